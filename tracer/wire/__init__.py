"""Bytes of HTTP requests and responses into attributes of spans: pure functions, see ../README.md."""
