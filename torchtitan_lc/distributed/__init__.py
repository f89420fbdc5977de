"""Process groups, meshes, sharding and reductions."""
