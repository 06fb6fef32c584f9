"""Weights from one layout to another: 3D resharding in a mesh, parameter reallocation between meshes.

`placements`, `grouping`, `formulas`, `planning` and `rounds` are arithmetic without torch; `dtensors`, `moving` and
`checksums` act on tensors.  Import from the modules.
"""
