"""What several tests share: the network is off, and one tiny recipe."""

import gc
import os
import re
import signal
import sys
import tempfile
import zlib

import pytest
from hypothesis import settings

from memfit.catalog.overheads import Overhead
from memfit.certify import in_this_process
from memfit.export import ways_out as ways_there
from memfit.families import families
from memfit.plan.memory import process
from memfit.plan.questions import ways_out
from memfit.plan.search import search
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora, Optimizer, Recipe
from share import beyond_the_cover, is_journey

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: a second thread only waits, and waits busily
_NO_CONFIG = tempfile.TemporaryDirectory(prefix="memfit-no-config-")  # gone when the tests are over
os.environ["XDG_CONFIG_HOME"] = _NO_CONFIG.name  # nobody's own rows
os.environ["MEMFIT_NO_CACHE"] = "1"  # no certificate of another test, or of another code
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what is in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and so would be what tests start

# The same examples every time; `make test-wide` looks for new ones. No test is about its own time.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("MEMFIT_EXAMPLES", "same"))

# Families with parts of their own; those of the others, another one has too.
OWN_PARTS = (
    "llama", "bloom", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox",
    "gpt_oss", "mixtral", "phi3", "qwen3",
)  # fmt: skip
ALIKE = frozenset(families) - frozenset(OWN_PARTS)
# A whole step is traced or run in each case: seconds.
TRACED = (
    "test_exactness.py", "test_memory.py", "test_live.py", "test_fake_cuda.py",
    "test_fast_fake.py", "test_compiled.py",
)  # fmt: skip
MANY = (
    *TRACED, "test_build.py", "test_instants.py", "test_step.py", "test_closed_form.py",
    "test_lean_blocks.py", "test_generation.py",
)  # fmt: skip
# Slow proofs whose cases differ in settings alone: one in so many.
SETTINGS = {
    "test_documents.py": 2, "test_exactness.py": 2, "test_fast_fake.py": 2,
    "test_instants.py": 2, "test_lean_blocks.py": 2, "test_world.py": 2,
}  # fmt: skip
# Predictions held to a trace of each setting, on a CPU and on a GPU: on one of the two, in turns.
EITHER = (
    "test_in_backward.py", "test_lion.py", "test_memory.py", "test_offload.py",
    "test_orthogonal_and_factored.py", "test_qat.py", "test_quantised_memory.py",
    "test_rollout_memory.py", "test_stochastic_rounding.py",
)  # fmt: skip
DEVICE = re.compile(r"cpu-x86|h100-sxm(5-80gb)?|a_cpu|cpu|cuda")


def pytest_ignore_collect(collection_path, config):
    """What `-m` leaves out whole need not be imported."""
    if "not journey" in config.option.markexpr and is_journey(collection_path):
        return True
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if is_journey(item.path):
            item.add_marker("journey")
        if zlib.crc32(item.nodeid.encode()) % share(item):
            item.add_marker("wide")
    for item in on_the_other_device(items):
        item.add_marker("wide")
    for item in [*beyond_the_cover(items)]:
        item.add_marker("wide")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        put_slow_files_first(items)


def put_slow_files_first(items):
    """So that what is left at the end is short, and all workers end together: a worker that has
    nothing left takes from the end of another's list."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def on_the_other_device(items):
    """Of tests that differ in the device alone, those whose turn it is not."""
    alike = {}
    for item in items:
        if item.path.name in EITHER and not item.get_closest_marker("wide"):
            alike.setdefault(DEVICE.sub("", item.nodeid), []).append(item)
    for key, found in alike.items():
        kept = zlib.crc32(key.encode()) % len(found)
        yield from (item for at, item in enumerate(found) if at != kept)


def pytest_collection_finish():
    gc.freeze()  # thousands of tests, which no collection need look at again
    gc.set_threshold(20_000, 30, 30)  # of plans, which make many small objects, an eighth faster


# What a plan says beside its recipe, by the marker of tests about it: each row is a further plan.
FURTHER_PLANS = {
    "levers": ((search, "replan_levers"), (search, "replan_shown")),
    "ways_out": ((ways_out, "find_ways_out"), (ways_there, "find_ways_out")),
}
WHOLE = {place: getattr(*place) for places in FURTHER_PLANS.values() for place in places}


def plan_further(item):
    """Plans have no levers and no ways out, which take up to nine tenths of their time, but in
    tests that are about them (markers `levers` and `ways_out`), of the page, and in wide cases.

    tests/plan/test_replanned.py, test_shown_levers.py and test_ways_out.py hold each of them to
    its own plan. Fixtures of any scope are made after this has run for their first test.
    """
    every = item.get_closest_marker("wide") or item.path.parent.name == "ui"
    for marker, places in FURTHER_PLANS.items():
        wanted = every or item.get_closest_marker(marker)
        for place in places:
            setattr(*place, WHOLE[place] if wanted else lambda *_: ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item, seen=[0]):  # noqa: B006 - kept from test to test
    """What libraries make when they are imported lives as long as the process does: a collection,
    which every real step begins with, need not look at it again (0.3 s with torch and others)."""
    plan_further(item)
    if len(sys.modules) > seen[0] + 200:
        seen[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


def share(item):
    """One in so many of such tests is part of `make test`, always the same ones.

    Of the proofs that run over every family and many settings: all settings of llama that are
    quick, and those of all families; of the others some. `make test-wide` takes all.
    """
    given = getattr(item, "callspec", None)
    if given is None:
        return 1
    few = SETTINGS.get(item.path.name, 1) if item.get_closest_marker("slow") is not None else 1
    return few * share_of_families(item, given)


def share_of_families(item, given):
    """What `share` is by the case's family."""
    if item.path.name not in MANY:
        return 1
    names = {str(value).partition(",")[0] for value in given.params.values()}
    one_of_many = "family" in given.params and "llama" not in names
    if item.path.name == "test_lean_blocks.py":
        return 3 if one_of_many else 1  # each family has blocks of its own
    slow = one_of_many and item.get_closest_marker("slow") is not None
    traced = one_of_many and item.path.name in TRACED
    return (4 if names & ALIKE else 1) * (4 if slow else 1) * (4 if traced else 1)


@pytest.fixture(scope="session", autouse=True)
def forks_end():
    yield
    if "forked" in sys.modules:
        sys.modules["forked"].end_server()


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture
def certified_here():
    """Certificates are made in this process meanwhile, for tests that do not prove that they have
    one of their own: that would import all libraries again."""
    with in_this_process():
        yield


@pytest.fixture
def few_ways_out(monkeypatch):
    """A plan's ways out are its knobs, limits, other methods and the host's memory meanwhile: more
    and larger devices and shorter rows are most of the plans that are tried, and tests about one
    way need none of them."""
    for name in ("_in_flight", "_counts", "_larger", "_rows"):
        monkeypatch.setattr(ways_out, name, lambda *_: ())


@pytest.fixture
def tensors_alone(monkeypatch):
    """Limits on a CPU are of live tensors meanwhile, so that a search is held to the byte."""
    nothing = Overhead(low=0, typical=0, high=0, source="the test", verified=True)
    for name in ("find_overhead", "find_working", "find_preparing"):
        monkeypatch.setattr(process, name, lambda device: nothing)
    monkeypatch.setattr(process, "ROUNDED", (1, 1, 1))


@pytest.fixture
def tiny_recipe():
    return Recipe(
        model=ModelReference(name="tiny", source="", config=TINY_LLAMA),
        weights="random",
        objective="pretrain",
        method="full",
        lora=Lora(),
        freeze=Freeze(),
        base_format="fp32",
        precision="fp32",
        optimizer=Optimizer(
            name="adamw",
            implementation="fused",
            learning_rate=1e-3,
            weight_decay=0.0,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            momentum=0.9,
            schedule="constant",
            warmup_steps=0,
            clip_norm=1.0,
        ),
        recompute_blocks=0,
        attention="flash",
        loss="plain",
        loss_chunk=0,
        sequence_length=16,
        packing=True,
        micro_batch=2,
        accumulation=2,
        steps=3,
        device="cpu-x86",
        seed=0,
    )
