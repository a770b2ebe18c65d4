"""A cluster as a model: where the design saturates, from costs that were measured here."""
