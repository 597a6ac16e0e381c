"""What engine and backends agree on: batches, the backend interface, buckets, pages, tiles."""
