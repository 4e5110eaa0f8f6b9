"""From hidden states to log-probabilities, choices and first tokens, without a batch of logits."""
