"""spangrad.tracer.gateway: see README.md in this folder."""

from spangrad.tracer.gateway.app import create_app
from spangrad.tracer.gateway.config import EngineConfig, GatewayConfig, HostedModel
from spangrad.tracer.gateway.serve import running, serve

__all__ = ["EngineConfig", "GatewayConfig", "HostedModel", "create_app", "running", "serve"]
