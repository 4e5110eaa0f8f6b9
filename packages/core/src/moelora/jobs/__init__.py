"""Files in, files out: the row schema, readers, writers, the report, and the job that joins them to the engine."""
