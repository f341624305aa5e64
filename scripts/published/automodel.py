"""NVIDIA-NeMo/Automodel: mixtures of experts on FSDP2, with Transformer Engine's kernels."""

from published import NotExpressible, Published, Translated


def translate(row: Published) -> Translated:
    if row["model"].get("n_experts"):
        raise NotExpressible("experts under FSDP2 with Transformer Engine's kernels: not described")
    raise NotExpressible("NeMo Automodel's step is not described")
