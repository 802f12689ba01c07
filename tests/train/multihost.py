"""One process of a run of several: `python -m tests.train.multihost PROCESS PROCESSES PORT OUT MODE`.

Modes: "whole"; "stop" ends hard after step 6; "cut" and "cut stop" do the same with sharded parameters;
"fresh" draws its own keys; "data" and "model" give process 1 other data or parameters; "alone" gives process
1 no mesh; "partial" gives a mesh of the own devices.
"""

import json
import os
import sys


def main(process: int, processes: int, port: str, out: str, mode: str) -> None:
    """Train, and print one line of JSON: the parameters, the evaluation or the error."""
    own = f"--xla_force_host_platform_device_count={4 // processes}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {own}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        patient = dict(initialization_timeout=1800, heartbeat_timeout_seconds=1800)  # on busy machines
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, **patient)
    import numpy as np
    import optax

    from tests.train.runs import plan
    from train import TrainOptions, fit

    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    if mode == "data" and process == 1:
        x[0] += 1
    start = np.float32(mode == "model" and process == 1)

    def loss(params, example):
        return (example["x"] @ params["w"] + params["b"] - example["y"]) ** 2

    def callback(step, metrics):
        if mode.endswith("stop") and step >= 6:
            os._exit(3)

    devices = jax.local_devices() if mode == "partial" else jax.devices()
    mesh = None if mode == "alone" and process == 1 else jax.sharding.Mesh(np.array(devices), ("data",))
    if mode.startswith("cut"):
        mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("model", "data"))
    keys = None if mode == "fresh" else ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
    options = TrainOptions(mesh=mesh, keys=keys, checkpoint_every=4, callback=callback, average=0.9)
    covered = plan("poisson", dataset_size=60, iterations=12, rate=0.3)
    params, rows = {"w": np.full(4, start), "b": np.zeros((), np.float32)}, {"x": x, "y": x.sum(1)}
    if mode.startswith("cut"):
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
        params["w"] = jax.make_array_from_callback((4,), spec, lambda at: np.full(4, start)[at])
    given = dict(out=None if out == "none" else out, evaluate=lambda p: {"w": float(p["w"][0])})
    try:
        result = fit(covered, params, loss, rows, optax.adam(0.1), **given, options=options)
    except ValueError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(2)
    found = [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves((result.params, result.opt_state))]
    print(json.dumps({"found": found, "evaluation": result.evaluation}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
