"""memfit: plan, certify, train and report the memory of an LLM training step.

    memfit.plan("qwen3-8b", device="4090", method="qlora", sequence_length=8192)

`plan`, `predict`, `certify`, `check`, `solve`, `export`, `train` and `report` are the verbs of the
command line; docs/api.md shows each, and `plan_model` and
`MemoryCallback` besides. Nothing is imported before the first of them is used.
"""

__version__ = "0.1.0"

_FROM = {
    **dict.fromkeys(("predict", "solve", "plan_model"), "memfit.workflows.python_verbs"),
    "MemoryCallback": "memfit.workflows.trainer_callback",
    "Request": "memfit.records.request",
    **dict.fromkeys(
        ("Error", "InvalidRequest", "UnknownName", "DoesNotFit", "NotCertified", "RunFailed"),
        "memfit.core.errors",
    ),
}
_PACKAGES = ("plan", "certify", "check", "export", "train", "report")  # which are called as verbs
__all__ = ["__version__", *_FROM, *_PACKAGES]


def __getattr__(name: str) -> object:
    """A verb, an exception or the record of a request, imported when it is first used."""
    from importlib import import_module  # which imports a dozen modules itself

    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _FROM:
        return getattr(import_module(_FROM[name]), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    """The names that a notebook completes."""
    return sorted(__all__)
