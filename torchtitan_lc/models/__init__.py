"""Models, each a package that registers a ModelSpec (see spec.py)."""
