"""Old history beside the store's file: moved into Parquet, read in place, deleted for good."""
