"""Token mixers, one file each. A mixer is `cls(config, layer_index)` with

`forward(hidden, memory=None, mask=None, cu_seqlens=None) -> hidden`, all `[B, T, D]`, where `memory` is a `LayerMemory`
to continue from and to write to. Its attribute `operator` is the function of `fwzoo.kernels` that it runs, or None.
"""
