"""Estimators and losses on one example: curves with several seeds."""
