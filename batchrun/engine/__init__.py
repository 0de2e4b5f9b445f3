"""The engine: continuous batching over a paged, prefix-sharing KV cache.

============  ===========================================================================================
`engine`      the loop, and `Engine` for Python users
`request`     what passes through it: requests, steps, what a step gives back (no torch)
`scheduler`   which tokens of which request run in the next step (no torch)
`blocks`      paged KV bookkeeping and the prefix cache (no torch)
`batch`       the flat arrays of a step; `transfer` moves them to the device
`executor`    runs steps on the device, in order; `graphs`: those that only decode, on a GPU
`sampler`     logits to tokens and log-probabilities
`stop`        when a request ends, and its text
`memory`      what a model needs of a machine (no torch)
`limits`      the bounds of a step (no torch)
`speculation` drafts of the tokens that follow, and whether verifying them pays
`step_times`  how long steps take here, by their size, kept on disk (no torch); `calibrate` measures them
============  ===========================================================================================
"""
