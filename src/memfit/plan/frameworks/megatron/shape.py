"""A model and a step in Megatron-LM's words: what one rank holds of each part of the model.

All sums serve one recipe or many: where a recipe's numbers are arrays, so are the results.
"""

from __future__ import annotations

from msgspec import structs

from memfit.core.errors import MemoryUnknown
from memfit.plan.frameworks import Job, Rule, divide
from memfit.plan.step_time.arrays import Number, ceil_div, larger, where
from memfit.records import Record
from memfit.records.model import Experts, Latent


class Attention(Record, frozen=True, kw_only=True):
    """Attention of a block; lengths are elements."""

    heads: int
    query: int  # width of all queries of a block
    keys: int  # width of all keys, and of all values
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    latent: Latent


class Mesh(Record, frozen=True, kw_only=True):
    """How many ranks share what."""

    tp: int
    sp: bool
    cp: int
    pp: int
    chunks: int  # virtual_pp
    ep: int
    etp: int  # tensor-parallel ranks of an expert
    shards: int  # ranks among which the states of dense weights are cut
    expert_shards: int


class Rows(Record, frozen=True, kw_only=True):
    """What a rank reads in a step."""

    batch: int  # sequences of a micro-batch
    sequence: int  # tokens of a sequence on one cp rank
    micro_batches: int


class Ends(Record, frozen=True, kw_only=True):
    """What stands before the first block and behind the last one."""

    vocab: int  # padded to make_vocab_size_divisible_by x tp
    embedding_norm: int  # elements of a norm behind the embedding
    positions: int  # rows of learned positions; 0 = rotary or none
    tied: bool


class Shape(Record, frozen=True, kw_only=True):
    """Sizes of the model, the micro-batch and the mesh; lengths are elements."""

    layers: int
    hidden: int
    attention: Attention
    ffn: int
    widen: int  # outputs of the first linear per element of ffn: 2 where gated, else 1
    norm: int  # vectors of a norm: 1 RMSNorm, 2 LayerNorm
    bias: bool  # of linears other than those of queries, keys and values
    experts: Experts
    shared_gate: bool  # a row that weighs the shared expert
    ends: Ends
    rows: Rows
    mesh: Mesh
    element: int  # bytes of an activation

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch inside a tensor-parallel matrix product."""
        return self.rows.batch * self.rows.sequence

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch between the matrix products."""
        return where(self.mesh.sp, self.tokens // self.mesh.tp, self.tokens)  # type: ignore[no-any-return]

    @property
    def stream(self) -> int:
        """Bytes of a micro-batch's hidden states between the products."""
        return self.element * self.own_tokens * self.hidden

    def count_kinds(self, start: Number, stop: int) -> tuple[Number, Number]:
        """Of blocks start to stop: how many have a plain feed-forward, and how many experts."""
        return count_kinds(self.experts, start, stop)

    @property
    def attention_parameters(self) -> int:
        """Of one block on one rank, with its norm."""
        h, one = self.hidden, self.norm * self.hidden
        if self.attention.latent.kv_rank:
            return one + self._latent_parameters
        wide = self.attention.query + 2 * self.attention.keys
        total = one + (h * wide + self.attention.query * h) // self.mesh.tp
        total += wide // self.mesh.tp if self.attention.qkv_bias else 0
        total += h if self.bias else 0
        return total + (2 * self.norm * self.attention.head_dim if self.attention.qk_norm else 0)

    @property
    def _latent_parameters(self) -> int:
        """Down-projections are whole on every rank, up-projections are cut by heads."""
        m, h = self.attention.latent, self.hidden
        wide = self.attention.heads * (m.unrotated + m.rotated)
        total = h * (m.kv_rank + m.rotated) + self.norm * m.kv_rank
        total += m.kv_rank * self.attention.heads * (m.unrotated + m.value) // self.mesh.tp
        total += self.attention.heads * m.value * h // self.mesh.tp
        if m.query_rank:
            return total + m.query_rank * (h + wide // self.mesh.tp) + self.norm * m.query_rank
        return total + h * wide // self.mesh.tp

    def feed_forward(self, width: int, ranks: int) -> int:
        """Return parameters of a feed-forward of that width cut among these ranks."""
        total = (self.widen + 1) * self.hidden * width // ranks
        return total + (self.widen * width // ranks + self.hidden if self.bias else 0)

    def dense_parameters(self, *, moe: bool) -> int:
        """Of a block, all but its routed experts."""
        total = self.attention_parameters + self.norm * self.hidden
        if not moe:
            return total + self.feed_forward(self.ffn, self.mesh.tp)
        total += self.experts.count * self.hidden  # the router
        if self.experts.shared_ffn:
            total += self.feed_forward(self.experts.shared_ffn, self.mesh.tp)
            total += self.hidden if self.shared_gate else 0
        return total

    @property
    def expert_parameters(self) -> int:
        """Of a block with experts, the routed ones on one rank."""
        return (
            self.experts.count // self.mesh.ep * self.feed_forward(self.experts.ffn, self.mesh.etp)
        )

    def adapter_parameters(self, adapted: frozenset[str], rank: int) -> int:
        """Of one block, the low-rank matrices beside those linears, cut among the tp ranks."""
        h, q = self.hidden, self.attention.query
        ends = {
            "linear_qkv": h + q + 2 * self.attention.keys, "linear_proj": q + h,
            "linear_fc1": h + self.widen * self.ffn, "linear_fc2": self.ffn + h,
        }  # fmt: skip
        return rank * sum(ends[linear] for linear in adapted) // self.mesh.tp

    @property
    def table(self) -> int:
        """Elements of the vocabulary's rows on one rank: of the embedding, and of the head."""
        return self.ends.vocab // self.mesh.tp * self.hidden


def count_kinds(experts: Experts, start: Number, stop: int) -> tuple[Number, Number]:
    """Of blocks start to stop: how many have a plain feed-forward, and how many experts."""
    if not experts.count:
        return stop - start, 0
    plain = larger(0, min(stop, experts.dense_layers) - start)
    return plain, stop - start - plain


def read_shape(job: Job) -> Shape:
    """The shape of a job; raises InvalidRequest where the mesh does not divide the model."""
    a, recipe = job.model.architecture, job.recipe
    p = recipe.parallel
    experts = _experts(job)
    kind = str(job.option("position_embedding_type"))
    tables = [w for w in job.model.weights if w.part == "embedding"]
    own = [w.shape[0] for w in tables if len(w.shape) == 2]
    positions = {"model": sum(own[1:]), "rope": 0}.get(kind, a.max_sequence)
    multiple = int(job.option("make_vocab_size_divisible_by")) * p.tp
    no_bias = bool(job.option("disable_bias_linear"))
    shards, expert_shards = read_shards(job)
    norms = [w for w in job.model.weights if w.part == "norm"]
    return Shape(
        layers=a.layers,
        hidden=a.hidden,
        attention=Attention(
            heads=a.heads,
            query=a.heads * a.head_dim,
            keys=a.kv_heads * a.head_dim,
            head_dim=a.head_dim,
            qkv_bias=a.attention_bias and not no_bias,
            qk_norm=a.qk_norm or bool(job.option("qk_layernorm")),
            latent=a.latent,
        ),
        ffn=a.ffn,
        widen=_widen(job),
        norm={"RMSNorm": 1, "LayerNorm": 2}.get(
            str(job.option("normalization")), min(2, len(norms)) or 1
        ),
        bias=a.mlp_bias and not no_bias,
        experts=experts,
        shared_gate=any("shared_expert_gate" in w.name for w in job.model.weights),
        ends=Ends(
            vocab=ceil_div(a.vocab, multiple) * multiple,
            embedding_norm=sum(w.numel for w in tables if len(w.shape) == 1),
            positions=positions,
            tied=a.tied_embeddings and not job.option("untie_embeddings_and_output_weights"),
        ),
        rows=Rows(
            batch=recipe.micro_batch,
            sequence=recipe.sequence_length // p.cp,
            micro_batches=recipe.accumulation,
        ),
        mesh=Mesh(
            tp=p.tp,
            sp=p.sequence_parallel & (p.tp > 1),
            cp=p.cp,
            pp=p.pp,
            chunks=p.virtual_pp,
            ep=p.ep,
            etp=_expert_ranks(job),
            shards=shards,
            expert_shards=expert_shards,
        ),
        element=4 if recipe.precision == "fp32" else 2,
    )


def _expert_ranks(job: Job) -> Number:
    return int(job.option("expert_tensor_parallel_size")) or job.recipe.parallel.tp


def read_shards(job: Job) -> tuple[Number, Number]:
    """Ranks among which the states of dense weights are cut, and those of experts."""
    if not job.option("use_distributed_optimizer"):
        return 1, 1
    p = job.recipe.parallel
    ranks = p.dp * p.cp * p.tp
    return p.dp_shard * p.cp, larger(1, ranks // (p.ep * _expert_ranks(job) * p.dp_replicate))


STRUCTURAL = (
    "untie_embeddings_and_output_weights", "disable_bias_linear", "qk_layernorm", "num_experts",
    "swiglu", "position_embedding_type", "normalization",
)  # fmt: skip


def check_parts(job: Job) -> None:
    """Refuse a model with parts that Megatron's GPT has not: their parameters are counted here.

    Not where Megatron's own arguments change the model: then its config says only part of it.
    """
    if any(job.option(name) not in (False, 0, "model") for name in STRUCTURAL):
        return
    read = read_shape(job)
    plain = structs.replace(
        read,
        ends=structs.replace(read.ends, vocab=job.model.architecture.vocab),
        mesh=structs.replace(read.mesh, tp=1, ep=1, etp=1, shards=1),
    )
    dense, sparse = plain.count_kinds(0, plain.layers)
    total = dense * plain.dense_parameters(moe=False)
    if sparse:
        total += sparse * (plain.dense_parameters(moe=True) + plain.expert_parameters)
    total += plain.table * (1 if plain.ends.tied else 2) + plain.ends.positions * plain.hidden
    total += plain.norm * plain.hidden + plain.ends.embedding_norm
    if total != job.model.parameters:
        raise MemoryUnknown(
            f"Megatron-LM's GPT of these sizes has {total} parameters, `{job.model.name}` has"
            f" {job.model.parameters}",
            hint="a model with other parts in its blocks is not described",
        )


def _experts(job: Job) -> Experts:
    """The model's own experts, or those that Megatron's arguments put into a dense model."""
    count = int(job.option("num_experts"))
    if not count:
        return job.model.architecture.experts
    return Experts(
        count=count,
        per_token=int(job.option("moe_router_topk")),
        ffn=int(job.option("moe_ffn_hidden_size")) or job.model.architecture.ffn,
        shared_ffn=int(job.option("moe_shared_expert_intermediate_size")),
    )


def _widen(job: Job) -> int:
    """Whether the feed-forward is gated: the model's weights tell, by their number of elements."""
    if job.option("swiglu") != "model":
        return 2 if job.option("swiglu") == "on" else 1
    a = job.model.architecture
    if a.experts.count:
        return 2  # every family with experts of its own is gated
    sizes = {a.ffn, 2 * a.ffn}
    total = sum(
        w.numel
        for w in job.model.weights
        if w.layer == 0 and len(w.shape) == 2 and sizes.intersection(w.shape)
    )
    return 2 if total >= 3 * a.hidden * a.ffn else 1


def list_divisions(job: Job) -> list[Rule]:
    """What Megatron-LM cuts into equal parts."""
    a, p, experts = job.model.architecture, job.recipe.parallel, _experts(job)
    pieces = where(p.cp > 1, 2 * p.cp, 1)

    def cut(name: str, parts: Number, what: str, whole: Number) -> Rule:
        of = f"{what} of `{job.model.name}`"
        return divide(what, name, parts, of, whole, hint="Megatron-LM needs equal parts")

    found = [
        cut("parallel.tp", p.tp, "attention heads", a.heads),
        cut("parallel.tp", p.tp, "key-value heads", a.kv_heads),
        cut("parallel.tp", p.tp, "elements of the feed-forward", a.ffn),
        cut("parallel.cp", pieces, "tokens", job.recipe.sequence_length),
        cut("parallel.ep", p.ep, "experts", experts.count),
    ]
    if experts.count:
        ranks, parts = p.dp * p.cp * p.tp, p.ep * _expert_ranks(job)
        found.append(cut("parallel.ep", parts, "ranks of a pipeline stage", ranks))
        found.append(
            Rule(
                "experts beside tensor parallelism",
                (p.tp > 1) & ~where(p.sequence_parallel, True, False),
                "`parallel.tp: {}` with experts needs `sequence_parallel`",
                (p.tp,),
                hint="Megatron-LM's moe_layer.py raises without it",
            )
        )
    return found
