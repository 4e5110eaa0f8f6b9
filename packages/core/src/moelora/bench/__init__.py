"""`moelora bench`: workloads, floors, and what is measured against them. Scores nothing that anyone keeps."""
