"""The recipe: a request with nothing left on `auto`. It determines every byte of a step."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Literal

import msgspec

from memfit.base_formats import find_base_format, name_coding
from memfit.core.kinds_of_numbers import (
    AtLeastOne,
    Fraction,
    NotNegative,
    NotNegativeFloat,
    Positive,
)
from memfit.objectives import Learned, find_objective
from memfit.records import Record
from memfit.records.model import ModelReference
from memfit.records.reinforcement import (
    Policy,
    RewardAdapter,
    RewardSettings,
    Rollout,
    ValueSettings,
)

Method = Literal["full", "freeze", "lora", "dora"]
Objective = str  # a name of `memfit.objectives`
Reference = Literal["none", "adapter-off", "precomputed", "second-model"]
Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed", "fp16", "fp8-mixed", "fp4-mixed"]
Scaling = Literal["plain", "rank-stabilised"]
Qat = Literal["", "int8", "int4"]
Attention = Literal["math", "flash", "efficient", "cudnn", "varlen", "eager"]
Loss = Literal["plain", "chunked", "fused"]
Recompute = Literal["full", "selective"]
Compile = Literal["none", "blocks", "model"]
Offload = Literal["none", "optimizer", "parameters", "activations"]
Lean = Literal["norm", "mlp"]
Option = bool | int | float | str
Schedule = Literal["constant", "linear", "cosine", "polynomial", "inverse-sqrt", "wsd"]
Decays = Literal["all", "matrices"]  # or: no biases and no norms
Stage = Annotated[int, msgspec.Meta(ge=1, le=3, description="1, 2 or 3")]
Implementation = Literal["fused", "foreach", "loop"]

FORMAT_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LEAN: tuple[Lean, ...] = ("norm", "mlp")  # operations that keep less for the backward
ADAPTED: tuple[Method, ...] = ("lora", "dora")  # small matrices beside a frozen base
OWN_STEP = "memfit"  # the framework whose step memfit itself runs
OWN_ATTENTION: tuple[Attention, ...] = ("math", "flash", "efficient", "cudnn", "varlen")
# What memfit's own step has, of the knobs that other frameworks' steps have more values of.
OWN_VALUES: dict[str, tuple[object, ...]] = {
    "precision": ("fp32", "bf16", "bf16-mixed", "fp16-mixed", "fp8-mixed"),
    "attention": OWN_ATTENTION,
    "loss": ("plain", "chunked"),
    "recompute": ("none", "full", "selective"),
    "compile": ("none", "blocks"),
    "offload": ("none", "activations", "optimizer", "parameters"),
}
# keys of `optimizer` that came later, and how older recipes stand
LATE_IN_OPTIMIZER = {
    "in_backward": False, "stochastic_rounding": False, "warmup_ratio": 0.0, "floor": 0.0,
    "power": 0.0, "decay_ratio": 0.0, "decays": "all", "lora_plus": 0.0,
    "layer_decay": 0.0,
}  # fmt: skip
# keys of `preference` that came later, and how older recipes stand
LATE_IN_PREFERENCE = {
    "loss_type": "sigmoid", "gamma": 0.0, "tau": 0.0, "cross_entropy": 0.0, "desirable": 0.0,
    "undesirable": 0.0, "center": 0.0,
}  # fmt: skip
LATE_IN_REWARD: dict[str, object] = {
    "missing_eos_penalty": 0.0, "adapter": msgspec.to_builtins(RewardAdapter()),
}  # fmt: skip
# untrained routers of 8 experts were measured at up to 1.2 on 2 ranks, 1.6 on 4 and 2.2 on 8
EP_IMBALANCE = 2.0
# keys of `parallel` that came later, and how older recipes stand
LATE_IN_PARALLEL: dict[str, object] = {"ep_imbalance": EP_IMBALANCE}
OWN_AXES = (
    "dp_replicate", "dp_shard", "reshard_after_forward", "tp", "sequence_parallel", "cp", "pp",
    "virtual_pp", "ep", "ep_imbalance",
)  # fmt: skip


def compute_dtype(precision: Precision) -> str:
    """Dtype of matrix products and of the saved activations."""
    known = {"fp32": "float32", "fp16": "float16", "fp16-mixed": "float16"}
    return known.get(precision, "bfloat16")


class Lora(Record, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2106.09685); rank 0 when the method has none."""

    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # last parts of module names, such as `q_proj`
    scaling: Scaling = "plain"  # of what is added: alpha / rank, or alpha / sqrt(rank)

    @property
    def factor(self) -> float:
        """What the product of the two matrices is multiplied by (rsLoRA: 2312.03732, eq. 5)."""
        return self.alpha / (self.rank if self.scaling == "plain" else self.rank**0.5)


class Quantisation(Record, frozen=True, kw_only=True):
    """How a quantised base is stored and multiplied; all zero where it is plain."""

    double: bool = False  # 4 bits: the scales are quantised themselves (2305.14314, section 3)
    # int8 (2208.07339): columns of the input with a number this large are multiplied in 16 bits
    outlier_threshold: float = 0.0  # 0: no column is
    outlier_share: float = 0.0  # columns of a projection that the certificate allows to be such


class Freeze(Record, frozen=True, kw_only=True):
    """What stays trainable when the method is `freeze`: the last blocks, or names that match."""

    last_blocks: NotNegative = 0  # with the final norm and the head
    patterns: tuple[str, ...] = ()  # fnmatch patterns over parameter names


class Preference(Record, frozen=True, kw_only=True):
    """How answers are compared (`memfit.objectives`); beta 0 under objectives that do not.

    The reference is the same weights with the adapter switched off, run before each micro-batch's
    own forward; or its log-probabilities are computed once, before the first step. Other trainers
    hold a second model. Objectives such as `simpo` compare with none.
    """

    beta: float = 0.0
    label_smoothing: float = 0.0  # share of the pairs taken to be the wrong way round
    reference: Reference = "none"
    loss_type: str = "sigmoid"
    gamma: float = (
        0.0  # `loss_type: simpo`: by how much the preferred answer's reward is to be the larger
    )
    tau: float = 0.0  # discopop's temperature
    cross_entropy: float = 0.0  # orpo, cpo: its weight beside the pairs' loss
    desirable: float = 0.0  # kto: weight of the losses of desirable answers
    undesirable: float = 0.0  # and of the others
    center: float = 0.0  # reward: weight of the square of both scores' sum


class Regularisation(Record, frozen=True, kw_only=True):
    """What holds a cross-entropy back, of `pretrain` and `sft`; all zero where nothing does.

    Evaluations are without it.
    """

    label_smoothing: Fraction = 0.0  # share of each target that is spread over all words
    z_loss: NotNegativeFloat = 0.0  # weight of the squared log of what the softmax divides by
    neftune_alpha: NotNegativeFloat = 0.0  # of noise on the token embeddings (2310.05914)

    @property
    def bends(self) -> bool:
        """Whether the loss is another one than the cross-entropy."""
        return bool(self.label_smoothing or self.z_loss)


class Optimizer(Record, frozen=True, kw_only=True):
    """The optimizer and its schedule. The implementation is part of the ledger: see `because`."""

    name: str
    implementation: Implementation
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    momentum: float
    schedule: Schedule
    warmup_steps: int
    clip_norm: float  # 0 = no clipping
    in_backward: bool = False  # each weight is updated as soon as backward has its gradient
    stochastic_rounding: bool = False  # of updated bf16 weights: up or down by chance, unbiased
    warmup_ratio: float = 0.0  # share of all steps that is warm-up, where `warmup_steps` is 0
    floor: float = 0.0  # of linear, cosine, polynomial, wsd: the last rate over the full one
    power: float = 0.0  # of polynomial
    decay_ratio: float = 0.0  # of wsd: share of all steps in which the rate falls
    decays: Decays = "all"  # what weight_decay is of
    lora_plus: float = 0.0  # rate of adapters' B over that of A (LoRA+); 0: they have one rate
    layer_decay: float = 0.0  # rate of a layer over that of the one above it; 0: all have one

    def warmup(self, steps: int) -> int:
        """Return the warm-up steps of `steps` in all; a share is rounded up, as in transformers."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * steps)

    def decay(self, steps: int) -> int:
        """The last steps of `steps`, in which wsd's rate falls; a share is rounded up."""
        return math.ceil(self.decay_ratio * steps)


# groups of keys that came later, and how older recipes stand
LATE: dict[str, Record] = {
    "quantisation": Quantisation(),
    "regularisation": Regularisation(),
}


class Parallel(Record, frozen=True, kw_only=True):
    """How many devices hold the model, along which axes of the mesh; 1 everywhere is one device.

    Of a request, what is not named is 1, or of memfit's own step shards the rest.
    """

    dp_replicate: Positive = 1  # copies of the (sharded) model
    dp_shard: Positive = 1  # ranks among which what `zero` names is cut
    reshard_after_forward: bool = True  # free gathered weights until the backward
    zero: Stage = 3  # what dp_shard cuts: 1 states, 2 gradients too, 3 weights too (1910.02054)
    tp: Positive = 1  # ranks that share each matrix product
    sequence_parallel: bool = False  # between products, tokens are cut among the tp ranks
    cp: Positive = 1  # ranks that share the tokens of a sequence
    pp: Positive = 1  # ranks that hold the blocks one after the other
    virtual_pp: Positive = 1  # pieces of the model that one pp rank holds
    ep: Positive = 1  # ranks among which the experts are dealt; taken from the data-parallel ones
    # of memfit's own step: rows that a rank receives for its experts, at most, over those that an
    # even routing would bring
    ep_imbalance: AtLeastOne = EP_IMBALANCE

    @property
    def dp(self) -> int:
        """Ranks with a share of the batch of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """Ranks among which FSDP2 cuts a copy of the model: those that share a row's tokens, too.

        As torchtitan: every rank has a part, and gradients are summed over all of them.
        """
        return self.dp_shard * self.cp

    @property
    def received(self) -> float:
        """Rows that a rank receives for its experts, at most, over an even share: no more than the
        rows of all."""
        return min(self.ep_imbalance, float(self.ep))

    @property
    def expert_shards(self) -> int:
        """Ranks among which FSDP2 cuts what an ep rank of memfit's own mesh has of the experts."""
        return self.dp_shard // self.ep

    def share(self, rank: int) -> int:
        """Which share of the batch a rank of memfit's own mesh reads: neighbours share products,
        and their neighbours the tokens of the same rows; all stages of a share read it."""
        return rank // (self.tp * self.cp) % self.dp

    def place(self, rank: int) -> int:
        """Which part of a row's tokens a rank of memfit's own mesh has."""
        return rank // self.tp % self.cp

    @property
    def stages(self) -> int:
        """Pieces of the model that run one after the other."""
        return self.pp * self.virtual_pp

    def stage_place(self, rank: int) -> int:
        """Which of the pp places a rank of memfit's own mesh has: the outermost axis, as stages
        send the least, so that machines may lie between them."""
        return rank // (self.world // self.pp)


class Recipe(Record, frozen=True, kw_only=True):
    """Everything that determines a step of one rank: no `None`, no `auto`."""

    schema: int = 1
    framework: str = OWN_STEP  # whose step it is; only memfit's can be certified and trained
    model: ModelReference
    weights: Literal["pretrained", "random"]
    objective: Objective
    method: Method
    lora: Lora
    freeze: Freeze
    base_format: str  # storage of frozen weights: a name of `memfit.base_formats`
    precision: Precision
    optimizer: Optimizer
    recompute_blocks: int  # the first n blocks are recomputed in backward; 0 = none
    attention: Attention
    loss: Loss
    loss_chunk: int  # tokens per chunk of the loss; 0 when plain
    sequence_length: int
    packing: bool
    micro_batch: int  # sequences per forward and backward, of one rank; a pair is two
    accumulation: int  # forwards of a rank per optimizer step; see `global_batch`
    steps: int
    device: str  # a catalogue id
    seed: int
    parallel: Parallel = Parallel()
    allocator: str = ""  # as in PYTORCH_ALLOC_CONF; "" takes torch's defaults, on a CPU none
    recompute: Recompute = "full"  # what is computed again in a recomputed block
    qat: Qat = ""  # what weights of blocks are rounded to in every product, as they will be stored
    lean: tuple[Lean, ...] = ()  # operations of blocks that keep less, in the order of `LEAN`
    # of memfit's own step: the blocks after those, recomputed but for products and attention
    selective_blocks: int = 0
    compile: Compile = "none"
    offload: Offload = "none"
    devices_per_node: int = 0  # of each machine; 0: one machine holds all ranks
    network: str = ""  # between machines, a row of links.toml; "": the device's usual one
    quantisation: Quantisation = Quantisation()
    options: dict[str, Option] = {}  # noqa: RUF012 (knobs that only this framework has)
    preference: Preference = Preference()
    regularisation: Regularisation = Regularisation()
    rollout: Rollout = Rollout()  # this and the next two are of objectives that sample answers
    policy: Policy = Policy()
    reward: RewardSettings = RewardSettings()
    value: ValueSettings = ValueSettings()  # of objectives that learn one

    def __post_init__(self) -> None:
        """Raise UnknownName for a storage format, or an objective, that nothing declares."""
        find_base_format(self.base_format)
        find_objective(self.objective)

    def __hash__(self) -> int:
        """Of the knobs that differ the most; options are a dict, which has no hash."""
        knobs = self.method, self.precision, self.loss_chunk, self.attention
        recomputed = self.recompute_blocks, self.selective_blocks
        shape = self.micro_batch, self.accumulation, self.sequence_length
        stored = self.base_format, self.optimizer.implementation, self.parallel
        return hash((self.model, *knobs, *recomputed, *shape, *stored))

    @property
    def is_own(self) -> bool:
        """Whether it is memfit's own step, which can be certified and trained."""
        return self.framework == OWN_STEP

    @property
    def placed_on(self) -> str:
        """Its devices in words: `l40s`, or `4 x l40s`."""
        world = self.parallel.world
        return f"{world} x {self.device}" if world > 1 else self.device

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that name this recipe; equal recipes have equal digests.

        A key that came later counts where it is set, so that older recipes keep their names.
        """
        content = msgspec.to_builtins(self)
        anywhere = ("devices_per_node", "network", "lean", "selective_blocks", "qat")
        for place, late in (*((content, key) for key in anywhere), (content["model"], "head")):
            if not place[late]:
                del place[late]
        if self.lora.scaling == "plain":
            del content["lora"]["scaling"]
        _drop_usual(content["optimizer"], LATE_IN_OPTIMIZER)
        _drop_usual(content["parallel"], LATE_IN_PARALLEL)
        for late, usual in LATE.items():
            if getattr(self, late) == usual:
                del content[late]
        _drop_usual(content["preference"], LATE_IN_PREFERENCE)
        if not self.preference.beta:
            del content["preference"]
        _drop_usual(content["reward"], LATE_IN_REWARD)
        if not self.samples:
            for late in ("rollout", "policy", "reward"):
                del content[late]
        if not self.values:
            del content["value"]
        encoded = msgspec.json.encode(content, order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]

    @property
    def course(self) -> str:
        """16 hexadecimal digits that name what is learned: recipes that differ in how it is
        computed alone, such as their ranks, have the same, and go on from each other's checkpoints.
        """
        micro_batch = self.global_batch
        if self.mismatches:  # over which, of all ranks, their mean is taken
            micro_batch = self.micro_batch * self.parallel.dp
        plain = msgspec.structs.replace(
            self,
            optimizer=msgspec.structs.replace(
                self.optimizer, implementation="loop", in_backward=False
            ),
            parallel=Parallel(), devices_per_node=0, network="", device="", allocator="",
            micro_batch=micro_batch, accumulation=self.global_batch // micro_batch,
            recompute_blocks=0, selective_blocks=0, recompute="full", lean=(), offload="none",
            loss="plain", loss_chunk=0, attention="math",
            rollout=msgspec.structs.replace(self.rollout, rows=0),
        )  # fmt: skip
        return plain.digest

    @property
    def adapted(self) -> bool:
        """Whether the base is frozen and small matrices beside it are trained."""
        return self.method in ADAPTED

    @property
    def prefers(self) -> bool:
        """Whether rows come in pairs, the preferred one first, as `dpo` has them."""
        return find_objective(self.objective).pairs

    @property
    def compares(self) -> bool:
        """Whether a row is one answer, learned from by its log-probability, paired or not."""
        return find_objective(self.objective).compares

    @property
    def rates(self) -> bool:
        """Whether rows are answers that are desirable or not, each by itself, as `kto` has them."""
        return find_objective(self.objective).rated

    @property
    def mismatches(self) -> bool:
        """Whether answers to other prompts are scored beside each micro-batch's own."""
        found = find_objective(self.objective)
        return found.rated and found.find_loss(self.preference.loss_type).mismatches

    @property
    def learns(self) -> Learned:
        """Of which tokens of preferred rows a cross-entropy is added to the loss of pairs."""
        return find_objective(self.objective).learns if self.preference.cross_entropy else ""

    @property
    def scores(self) -> bool:
        """Whether a score head stands in place of the language model's, as `reward` has it."""
        return find_objective(self.objective).scores

    @property
    def samples(self) -> bool:
        """Whether answers are sampled while it trains, as `grpo` does."""
        return find_objective(self.objective).samples

    @property
    def copies_reference(self) -> bool:
        """Whether a frozen copy of the trained weights is held beside them: what sampled answers
        are compared with, where no adapter can be switched off."""
        return self.samples and self.policy.beta > 0 and not self.adapted

    @property
    def values(self) -> bool:
        """Whether a value of each token is learned beside the policy, as `ppo` does."""
        return find_objective(self.objective).values

    @property
    def scored_by_adapter(self) -> bool:
        """Whether an adapter of the base, with a head of its own, scores sampled answers."""
        return self.reward.adapter.rank > 0

    @property
    def references(self) -> int:
        """Forwards without a gradient beside each micro-batch's own."""
        runs = int(self.preference.reference in ("adapter-off", "second-model"))
        return runs * (1 + self.mismatches)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step, of all ranks."""
        return self.micro_batch * self.accumulation * self.parallel.dp

    @property
    def own_rows(self) -> int:
        """Sequences per optimizer step that one rank reads."""
        return self.micro_batch * self.accumulation

    @property
    def own_row(self) -> int:
        """Tokens of a row that one rank of memfit's own step has."""
        return self.sequence_length // self.parallel.cp

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def worst_documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Lengths of each row's documents where a packed micro-batch needs the most memory.

        The math kernel keeps what grows with the square of a document: one document a row. The
        others keep what grows with the row, and a second document adds the copy that joins the
        outputs: one token beside a document that fills the rest. None when rows are not packed.
        """
        if not self.packing:
            return None
        length = self.sequence_length
        row = (length,) if self.attention == "math" or length == 1 else (length - 1, 1)
        return (row,) * self.micro_batch

    @property
    def trainable_dtype(self) -> str:
        """Storage dtype of trainable parameters: fp32 master copies unless all is 16-bit."""
        return FORMAT_DTYPE.get(self.precision, "float32")

    @property
    def frozen_dtype(self) -> str:
        """Storage dtype of frozen parameters, of those that are not quantised."""
        return find_base_format(self.base_format).dtype or self.compute_dtype

    @property
    def coding(self) -> str:
        """How blocks' projections are quantised (`memfit.base_formats`); "": they are not."""
        return name_coding(self.base_format, double=self.quantisation.double)

    @property
    def compute_dtype(self) -> str:
        """Dtype of matrix products and of the saved activations."""
        return compute_dtype(self.precision)

    @property
    def autocast(self) -> bool:
        """Whether the forward runs under `torch.autocast`, in `compute_dtype`."""
        return self.precision in ("bf16-mixed", "fp16-mixed", "fp8-mixed")

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: fp16's smallest number is 6e-8, and gradients are smaller."""
        return self.precision == "fp16-mixed"


def _drop_usual(keys: dict[str, object], usual: dict[str, object]) -> None:
    """Take out keys that stand as they do in older recipes."""
    for name, value in usual.items():
        if keys[name] == value:
            del keys[name]
