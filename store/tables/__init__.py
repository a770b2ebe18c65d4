"""spangrad.store.tables: what `FileStore` does to each group of tables."""
