"""vLLM finds spangrad's weight-transfer backend through this module.

`pyproject.toml` names `register` as an entry point of `vllm.general_plugins`, so that
every vLLM process of the environment calls it. It adds one name to a table; the backend
itself (`vllm_backend.py`) is imported only in engines that chose it.
"""

BACKEND = "spangrad_file"
"""Name of the backend: `--weight-transfer-config '{"backend": "spangrad_file"}'`."""

REFUSAL = "spangrad_file refused the weights: "
"""How the error starts when a file was refused before the model was touched."""


def register() -> None:
    """Make the backend known to vLLM; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "spangrad.trainer.serving.vllm_backend", "FileWeightTransferEngine"
        )
