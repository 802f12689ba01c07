"""The mechanisms that plans certify, a file a kind of plan, behind one protocol.

Read `protocol` first (a request, its checks, the registry), then `step` (clipped sum, noise, optimizer) and
`bandmf` (per-example clipping under a `Plan`); `batch_clipping`, `convex` and `dice` are those of the other
plans. `by_device` computes a batch over a mesh, `stored` checks numbers on their way into memory.
"""
