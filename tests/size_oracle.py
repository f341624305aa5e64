"""Allocations, frees and saved bytes of real CPU tensors, and of sizes.

A dispatch mode of its own and torch's hooks on saved tensors; nothing of memfit's tracer is used.
"""

import itertools
import warnings
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import meta
from memfit.meta.autograd import record
from memfit.meta.elementwise import attach
from memfit.records.ledger import Kind

HOST_SCALAR = 16  # bytes; loss values and such, which no peak depends on


class Births(TorchDispatchMode):
    """Sizes of storages as they come (positive) and go (negative)."""

    def __init__(self, *known):
        super().__init__()
        self.events = []
        self.alive = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def gone(_):
            del self.alive[key]
            self.events.append(-nbytes)

        self.alive[key] = weakref.ref(storage, gone)
        self.events.append(nbytes)


def highest(births):
    """Bytes of the highest instant, above what was there before."""
    return max(itertools.accumulate(births.events, initial=0))


def adapted(model, *, lora, checkpointing, reentrant=False, saved=""):
    """Hugging Face's model in training, with small adapters or recomputed blocks where asked.

    saved: modules that peft copies to be trained whole, comma-separated.
    """
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        if saved:  # of a matrix that is tied
            warnings.simplefilter("ignore", UserWarning)
        if lora:
            from peft import LoraConfig, get_peft_model

            wanted = LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
                modules_to_save=saved.split(",") if saved else None,
            )  # fmt: skip
            model = get_peft_model(model, wanted)
        if checkpointing:
            chosen = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
    return model.train()


def ordered(events):
    """Frees between two allocations have no order of their own; host scalars are left out."""
    kept = [e for e in events if abs(e) > HOST_SCALAR]
    groups = itertools.groupby(kept, key=lambda e: e < 0)
    return [e for freed, group in groups for e in (sorted(group) if freed else group)]


def meter_events(meter, start=0):
    return ordered(meter.held(e) if e >= 0 else -meter.held(~e) for e in meter.events[start:])


def saved_bytes(saved, inputs):
    """Bytes of distinct storages that autograd keeps, beside those of the inputs."""
    own = {id(t.storage) if hasattr(t, "storage") and not isinstance(t, torch.Tensor)
           else t.untyped_storage()._cdata for t in inputs}  # fmt: skip
    found = {}
    for t in saved:
        if isinstance(t, torch.Tensor):
            found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        else:
            found[id(t.storage)] = t.meter.held(t.storage.index)
    return sum(n for key, n in found.items() if key not in own and n > HOST_SCALAR)


def listen(meter):
    """The tensors that nodes save from now on, outside recomputed regions."""
    saved, plain = [], meter.pack

    def pack(tensor):
        if meter.saver is None:
            saved.append(tensor)
        return plain(tensor)

    meter.pack = pack
    return saved


def ours(function, inputs, autocast=False):
    meter = meta.Meter()
    tensors = [make(meter, *i) for i in inputs]
    saved = listen(meter)
    start = len(meter.events)
    with meter.with_autocast(autocast):
        out = function(*tensors)
    kept = saved_bytes(saved, tensors)
    del saved[:]
    meta.backward(total(out))
    del out
    return meter_events(meter, start), kept


def total(x):
    """A scalar whose backward hands an expanded view to x's node, as `x.sum()` does."""

    def rule(node, grads):
        return (grads[0].viewed(x_shape, (0,) * len(x_shape)),)

    x_shape = x.shape
    return attach(record(rule, (x,)), meta.empty(x.meter, (), x.dtype))


def make(meter, shape, dtype="float32", grad=True):
    t = meta.empty(meter, shape, dtype, Kind.PARAMETERS)
    t.requires_grad = grad
    return t


def theirs(function, inputs, autocast=False):
    tensors = [
        torch.zeros(shape, dtype=getattr(torch, (rest or ["float32"])[0]),
                    requires_grad=rest[1] if len(rest) > 1 else True)
        for shape, *rest in inputs
    ]  # fmt: skip
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with Births(*tensors) as births:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False), keep:
            out = function(*tensors)
        kept = saved_bytes(saved, tensors)
        del saved[:]
        out.sum().backward()
        del out
    return ordered(births.events), kept


def agree(torch_function, sizes_function, *inputs, autocast=False):
    real, saved = theirs(torch_function, inputs, autocast)
    mine, kept = ours(sizes_function, inputs, autocast)
    assert kept == saved
    return real, mine
