"""Context-parallel attention: takes tensors, numbers and process groups; knows no config and no model."""
