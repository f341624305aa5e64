"""What nanotron's step asks of the allocator, in its order: an oracle for the closed form.

Written from `models/llama.py`, `parallel/tensor_parallel/functional.py`, `optim/zero.py` and
`parallel/pipeline_parallel/engine.py` for one pipeline rank without tensor parallelism, and
replayed by memfit's allocator, which knows nothing of the closed form.
"""

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.settings import Settings


class Tape:
    """Storages by number, on one device."""

    def __init__(self):
        self.device, self.count = CachingAllocator(Settings()), 0

    def new(self, nbytes):
        self.count += 1
        self.device.allocate(self.count, int(nbytes))
        return self.count

    def free(self, *tensors):
        for tensor in tensors:
            self.device.free(tensor)


def forward(tape, a, tokens):
    new, h, f = tape.new, 2 * tokens * a.hidden, 2 * tokens * a.ffn
    saved = {"x": new(h), "y1": new(h), "r1": new(4 * tokens)}
    qkv = new(3 * h)
    saved["q"] = new(3 * h)
    joined = new(2 * h)
    saved["kv"] = new(2 * h)
    tape.free(joined)
    saved |= {"out": new(h), "lse": new(4 * tokens * a.heads)}
    projected = new(h)
    tape.free(qkv)
    saved["x2"] = new(h)
    tape.free(projected)
    saved |= {"y2": new(h), "r2": new(4 * tokens), "gu": new(2 * f), "silu": new(f)}
    saved["product"] = new(f)
    projected = new(h)
    tape.free(projected)
    return saved


def backward(tape, a, tokens, saved, gradients):
    new, free, h, f = tape.new, tape.free, 2 * tokens * a.hidden, 2 * tokens * a.ffn
    width = 2 * a.hidden
    product = new(f)
    gradients.append(new(width * a.ffn))
    free(saved["product"])
    up, silu = new(f), new(f)
    free(product, saved["silu"])
    gate = new(f)
    free(silu)
    both = new(2 * f)
    free(gate, up, saved["gu"])
    y = new(h)
    gradients.append(new(2 * width * a.ffn))
    free(both, saved["y2"])
    x = new(h)
    free(y, saved["r2"], saved["x2"])
    out = new(h)
    gradients.append(new(width * a.hidden))
    q, k, v, exact = new(h), new(h), new(h), new(2 * h)
    free(exact, out, saved["out"], saved["lse"])
    kv = new(2 * h)
    free(k, v, saved["kv"])
    three = new(3 * h)
    free(q, kv, saved["q"])
    y = new(h)
    gradients.append(new(3 * width * a.hidden))
    free(three, saved["y1"])
    first = new(h)
    free(y, x, first, saved["r1"], saved["x"])


def replay(a, *, blocks, micro_batches, in_flight, tokens, shards, replicas, steps=2):
    """Reserved bytes of the first pipeline rank of several, after `steps` steps."""
    tape = Tape()
    h = a.hidden
    sizes = [a.vocab * h] + [3 * h * h, h * h, 2 * h * a.ffn, h * a.ffn] * blocks
    total = sum(sizes)
    for size in sizes:
        tape.new(2 * size)
    tape.new(4 * total)
    tape.new(4 * total // shards)
    if replicas > 1:
        for size in sizes:
            tape.new(2 * size)
    tape.device.empty_cache()
    for step in range(steps):
        waiting = []
        for _ in range(micro_batches):
            waiting.append([forward(tape, a, tokens) for _ in range(blocks)])
            if len(waiting) == in_flight:
                _micro_backward(tape, a, tokens, waiting.pop(0))
        while waiting:
            _micro_backward(tape, a, tokens, waiting.pop(0))
        if step == 0:
            for size in sizes:
                tape.new(4 * size // shards)
                tape.new(4 * size // shards)
        if shards > 1:
            parts = [tape.new(2 * total // shards) for _ in range(shards + 1)]
            tape.free(tape.new(2 * total), *parts)
    return tape.device.reserved


def _micro_backward(tape, a, tokens, saved):
    gradients = []
    for one in reversed(saved):
        backward(tape, a, tokens, one, gradients)
    tape.free(tape.new(2 * a.vocab * a.hidden), *gradients)
