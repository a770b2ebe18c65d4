"""spangrad.tracer.gateway: see README.md in this folder."""
