"""Turn the spans that an agent already emits into gradients for the model behind it."""
