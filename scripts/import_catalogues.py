"""Write the catalogue's TOML rows from the two research files that they began as.

    python scripts/import_catalogues.py hardware.json models.json

Run once; afterwards the TOML rows are the source of truth and are edited by hand. What this script
adds to the JSON is written here as tables, so that each addition can be read and disputed.
"""

import json
import re
import sys
from pathlib import Path

CATALOG = Path(__file__).parent.parent / "src" / "memfit" / "catalog"
CHECKED = "2026-11-20"
MIB_TORCH_LACKS = 717  # 0.7 GiB: the most that the driver was seen to keep from torch

# What `torch.cuda.get_device_name()` prints, read in public logs of each device.
DRIVER_NAMES = {
    "v100-sxm2-16": ["Tesla V100-SXM2-16GB"],
    "v100-sxm2-32": ["Tesla V100-SXM2-32GB"],
    "t4": ["Tesla T4"],
    "a10": ["NVIDIA A10"],
    "a10g": ["NVIDIA A10G"],
    "a30": ["NVIDIA A30"],
    "a40": ["NVIDIA A40"],
    "rtx-a6000": ["NVIDIA RTX A6000"],
    "a100-sxm-40": ["NVIDIA A100-SXM4-40GB", "A100-40GB"],
    "a100-sxm-80": ["NVIDIA A100-SXM4-80GB", "A100-80GB"],
    "a100-pcie-40": ["NVIDIA A100-PCIE-40GB"],
    "a100-pcie-80": ["NVIDIA A100 80GB PCIe"],
    "l4": ["NVIDIA L4"],
    "l40": ["NVIDIA L40"],
    "l40s": ["NVIDIA L40S"],
    "rtx-6000-ada": ["NVIDIA RTX 6000 Ada Generation"],
    "h100-pcie": ["NVIDIA H100 PCIe"],
    "h100-sxm": ["NVIDIA H100 80GB HBM3", "H100-80GB"],
    "h100-nvl": ["NVIDIA H100 NVL"],
    "gh200-96": ["NVIDIA GH200 480GB", "NVIDIA GH200 120GB"],  # the memory named is the host's
    "h200-sxm": ["NVIDIA H200"],
    "h200-nvl": ["NVIDIA H200 NVL"],
    "h20": ["NVIDIA H20"],
    "b200-sxm": ["NVIDIA B200"],
    "b300-sxm": ["NVIDIA B300 SXM6 AC"],
    "gb200": ["NVIDIA GB200"],
    "gb300": ["NVIDIA GB300"],
    "gb10": ["NVIDIA GB10"],
    "rtx-pro-6000": [
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    ],
    "mi210": ["AMD Instinct MI210"],
    "mi250x": ["AMD Instinct MI250X"],
    "mi300x": ["AMD Instinct MI300X"],
    "mi325x": ["AMD Instinct MI325X"],
    "mi350x": ["AMD Instinct MI350X"],
    "mi355x": ["AMD Instinct MI355X"],
}
SOURCES = {  # said more plainly than in the research file
    "smi": "memory.total of nvidia-smi or rocm-smi, as printed in many public logs of the device",
    "oom": "'GPU 0 has a total capacity of X GiB' in public out-of-memory messages of torch's",
    "teton": "pytorch/torchtitan @6fc499f benchmarks/llama3_h100_202412_torchtitan.md (hardware)",
    "dsv3": "DeepSeek-V3 technical report (2412.19437), section 3: H800 and its NVLink",
}
ADDED = {  # parts that differ from a row of the research file -> that row, and the differences
    "h100-sxm-96": (
        "h100-sxm",
        {
            "name": "H100 SXM5 96GB HBM2e (500 W)", "memory_gb_marketing": 96, "tdp_w": 500,
            "memory_bandwidth_gbs": 2400, "unverified_fields": ["bf16", "fp8"],
            "internode_typical": "8x400 Gb/s RoCE (1 per GPU, 50 GB/s per GPU)",
            "notes": "Grand Teton's; its owners do not know its peak, between SXM's and NVL's",
            "sources": ["teton"],
        },
    ),
    "h800-sxm": (
        "h100-sxm",
        {
            "name": "H800 SXM5 80GB", "gpu_link": {"type": "NVLink 4", "unidirectional_gbs": 200},
            "unverified_fields": ["gpu_link", "torch_total_gib"], "driver_total_mib": 81559,
            "torch_total_gib": "79.10-79.25", "notes": "8 of H100's 18 NVLinks",
            "sources": ["dsv3"],
            "internode_typical": "8x400 Gb/s InfiniBand NDR (1 per GPU, 50 GB/s per GPU)",
        },
    ),
}  # fmt: skip
UNKNOWN = dict.fromkeys(
    ("driver_total_mib", "driver_total_source", "torch_total_gib",
     "measured_max_matmul_bf16_tflops", "measured_max_matmul_fp8_tflops")
) | {"price_usd_per_gpu_hour": [], "aliases": []}  # fmt: skip
# Of a price's source: seller, where (one of the places at that price), when, and its name in
# prices.toml. A copy of SkyPilot's catalogue carries no date: the day of reading stands instead.
SELLERS = {
    "sky-lambda": ("Lambda", "", CHECKED, "sky-lambda"),
    "sky-nebius": ("Nebius", "eu-north1", CHECKED, "sky-nebius"),
    "sky-nebius (8 vCPU)": ("Nebius", "eu-north1", CHECKED, "sky-nebius"),
    "sky-verda": ("Verda", "Finland", CHECKED, "sky-verda"),
    "sky-runpod (A100 PCIe)": ("RunPod", "", CHECKED, "sky-runpod"),
    "tpuprice": ("Google Cloud", "", "2024-12-23", "tpuprice"),
    "June 2026 article: g5.xlarge $1.006/h": ("AWS", "", "2026-06", "article"),
    "AWS Capacity Blocks page (rates to 2025-01-01)": ("AWS", "US East", "2024", "awsblocks"),
    "awsneg": ("AWS", "", "2026-05", "awsneg"),
}
PRICE_SOURCES = {
    "article": "article of June 2026 that names g5.xlarge at $1.006/h",
    "awsblocks": "aws.amazon.com/ec2/capacityblocks/pricing, rates valid to 2025-01-01",
}
PRICES_ADDED = {  # read in the same copies as the others
    "v100-sxm2-16": [{"usd": 0.1381, "kind": "spot", "source": "sky-verda"}],
    "a10": [{"usd": 1.29, "kind": "on-demand", "source": "sky-lambda"}],
    "a100-sxm-40": [
        {"usd": 1.99, "kind": "on-demand", "source": "sky-lambda"},
        {"usd": 1.844, "kind": "capacity block", "source": "awsblocks"},
    ],
    "a100-pcie-40": [{"usd": 1.99, "kind": "on-demand", "source": "sky-lambda"}],
    "a100-sxm-80": [
        {"usd": 2.79, "kind": "8x node 22.32/8", "source": "sky-lambda"},
        {"usd": 0.4515, "kind": "spot", "source": "sky-verda"},
    ],
    "rtx-4090": [{"usd": 0.74, "kind": "on-demand", "source": "sky-runpod"}],
    "rtx-5090": [{"usd": 0.99, "kind": "on-demand", "source": "sky-runpod"}],
    "h100-sxm": [
        {"usd": 0.8015, "kind": "spot", "source": "sky-verda"},
        {"usd": 1.25, "kind": "spot", "source": "sky-nebius"},
    ],
    "h200-sxm": [
        {"usd": 1.45, "kind": "spot", "source": "sky-nebius"},
        {"usd": 5.408, "kind": "capacity block", "source": "awsblocks"},
    ],
    "b200-sxm": [{"usd": 1.712, "kind": "spot", "source": "sky-verda"}],
    "b300-sxm": [{"usd": 2.447, "kind": "spot", "source": "sky-verda"}],
    "rtx-pro-6000": [{"usd": 0.5915, "kind": "spot", "source": "sky-verda"}],
}
FIELD = {  # of the JSON's `unverified_fields`
    "driver_total_mib": "memory_driver",
    "memory_bandwidth_gbs": "bandwidth",
    "gpu_link": "link",
    "dense_tflops": "flops",
    "memory_gb_marketing": "memory_datasheet",
    "torch_total_gib": "memory",
    "internode_typical": "internode",
} | {d: f"flops.{d}" for d in ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")}

NETWORK = {  # how the JSON's `internode_typical` begins -> row of links.toml, where it says enough
    "24x100 Gb/s integrated": "gaudi-24x100",
    "24x200 Gb/s integrated": "gaudi-24x200",
    "2x200 Gb/s ConnectX-7": "connectx-2x200",
    "4x100 Gb/s EDR": "edr-4x100",
    "4x200 Gb/s Slingshot": "slingshot-4x200",
    "8x200 Gb/s HDR": "hdr-8x200",
    "8x400 Gb/s InfiniBand NDR": "ndr-8x400",
    "8x400 Gb/s (AWS P6-B200)": "ndr-8x400",
    "8x400 Gb/s": "roce-8x400",
    "8x800 Gb/s XDR": "xdr-8x800",
    "EFA v3 16x200 Gb/s": "efa-16x200",
    "NVL72 rack": "nvl72",
}

MODEL_TYPE = {  # of the JSON's `arch`; a label in MODEL_TYPE_BY_LABEL goes first
    "gptneox": "gpt_neox",
    "gemma3": "gemma3_text",
    "falcon7": "falcon",
    "falcon40": "falcon",
    "stablelm2": "stablelm",
    "stablelm12": "stablelm",
}
MODEL_TYPE_BY_LABEL = {"Mistral": "mistral", "SmolLM3": "smollm3", "Granite": "granite"}
FRIENDLY = {  # ids that people type; the rest are the name in lower case
    "tiny-llama-1.1b": "tinyllama-1.1b",
    "OLMo-2-0425-1B": "olmo-2-1b",
    "OLMo-2-1124-7B": "olmo-2-7b",
    "OLMo-2-1124-13B": "olmo-2-13b",
    "OLMo-2-0325-32B": "olmo-2-32b",
}
DETAILS = (  # facts of other families, kept under their own names
    "n_experts", "top_k", "moe_ffn", "shared_experts", "shared_ffn", "dense_layers",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "mtp_layers", "qk_norm",
)  # fmt: skip


def text(value):
    """A TOML value; strings as JSON writes them, which TOML reads too."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {text(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + "".join(f"  {text(v)},\n" for v in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(text(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def row_of(key, fields):
    """One table; absent values leave no line."""
    name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f'"{key}"'
    lines = [f"{k} = {text(v)}" for k, v in fields.items() if v is not None]
    return f"[{name}]\n" + "\n".join(lines) + "\n"


def number(value):
    return f"{value:.12g}"


def rate(gbs):
    """GB/s, from 1000 on in TB/s."""
    if gbs is None:
        return None
    return f"{number(gbs / 1000)} TB/s" if gbs >= 1000 else f"{number(gbs)} GB/s"


def tflops(values):
    return {k: f"{number(v)} TFLOP/s" for k, v in values.items() if v is not None}


def usable(device, unverified):
    """Memory that torch can use: the low end of what was printed, or the driver's less 0.7 GiB."""
    if device["torch_total_gib"]:
        low = min(float(n) for n in re.findall(r"\d+\.\d+", device["torch_total_gib"]))
        return f"{low:.2f} GiB"
    if device["driver_total_mib"] is None:
        return None
    unverified.append("memory")
    return f"{device['driver_total_mib'] - MIB_TORCH_LACKS} MiB"


def one_of_two(device):
    """MI250X: the research row is the package, which torch sees as two devices; keep one."""
    half = dict(device, name="Instinct MI250X (one of its 2 GCDs)", memory_gb_marketing=64)
    half["memory_bandwidth_gbs"] = device["memory_bandwidth_gbs"] / 2
    half["dense_tflops"] = {k: v and v / 2 for k, v in device["dense_tflops"].items()}
    half["tdp_w"] = device["tdp_w"] / 2
    half["node_gpus_typical"] = 8
    half["aliases"] = []
    half["notes"] = (
        "this row is one GCD, which is what torch sees: half of the package's 128 GB, 383 TFLOP/s"
        " bf16, 3277 GB/s and 560 W. fp32 is the matrix rate (vector: 23.95)"
    )
    return half


def with_added(every):
    """The research file's devices, each followed by the parts that differ from it."""
    found = []
    for device in every:
        parts = [(key, changes) for key, (base, changes) in ADDED.items() if base == device["id"]]
        found += [device, *(device | UNKNOWN | {"id": key} | changes for key, changes in parts)]
    return found


def match_strings(device, every):
    """Driver names, and the aliases that name this row alone."""
    others = [d for d in every if d is not device]
    kept = []
    for alias in device["aliases"]:
        slug = alias.lower().replace(" ", "-")
        shared = any(
            slug == o["id"] or o["id"].startswith(f"{slug}-") or alias in o["aliases"]
            for o in others
        )
        if not shared and slug != device["id"]:
            kept.append(alias)
    names = DRIVER_NAMES.get(device["id"], [])
    if device["id"].startswith("rtx-") and not names:
        names = ["NVIDIA " + re.sub(r" \d+GB$", "", device["name"])]
    return [*names, *kept]


def device_row(device, every):
    if device["id"] == "mi250x":
        device = one_of_two(device)
    unverified = [FIELD.get(f, f) for f in device["unverified_fields"]]
    notes = [device["notes"]]
    if device["driver_total_source"]:
        notes.append(f"driver's memory: {device['driver_total_source']}")
    notes += [device["gpu_link"].get("note", "")]
    if p2p := device["gpu_link"].get("p2p_unidirectional_gbs"):
        notes.append(f"between two devices {number(p2p)} GB/s")
    measured = {
        k: device.get(f"measured_max_matmul_{k}_tflops")
        for k in ("bf16", "fp8")
        if device.get(f"measured_max_matmul_{k}_tflops")
    }
    memory = usable(device, unverified)
    datasheet = str(device["memory_gb_marketing"])
    said = device["internode_typical"] or ""
    fields = {
        "name": device["name"],
        "vendor": device["vendor"],
        "architecture": device["arch"],
        "compute_capability": device["compute_capability"],
        "match": match_strings(device, every),
        "memory": memory,
        "memory_driver": device["driver_total_mib"] and f"{device['driver_total_mib']} MiB",
        "memory_datasheet": datasheet if "RAM" in datasheet else f"{datasheet} GB",
        "bandwidth": rate(device["memory_bandwidth_gbs"]),
        "flops": tflops(device["dense_tflops"]),
        "flops_measured": tflops(measured) or None,
        "link": {
            k: v
            for k, v in (
                ("name", device["gpu_link"]["type"]),
                ("unidirectional", rate(device["gpu_link"]["unidirectional_gbs"])),
            )
            if v
        },
        "internode": device["internode_typical"],
        "network": next((row for words, row in NETWORK.items() if said.startswith(words)), None),
        "pcie_generation": device["pcie_gen"],
        "devices_per_node": str(device["node_gpus_typical"]),
        "power": device["tdp_w"] and f"{number(device['tdp_w'])} W",
        "unverified": list(dict.fromkeys(unverified)),
        "notes": "; ".join(n for n in notes if n) or None,
        "sources": device["sources"],
        "checked": CHECKED,
    }
    return row_of(device["id"], fields)


def price_row(device):
    """The prices of one device; None where nobody states one.

    A share of a whole node is on demand too, said in `note`. RunPod's A100 is its PCIe card.
    """
    rows = []
    for price in [*device["price_usd_per_gpu_hour"], *PRICES_ADDED.get(device["id"], [])]:
        if "(A100 PCIe)" in price["source"] and "pcie" not in device["id"]:
            continue
        known = price["kind"] in ("on-demand", "spot", "capacity block")
        found = (s for s in SELLERS.values() if s[3] == price["source"])
        seller, region, date, source = SELLERS.get(price["source"]) or next(found)
        note = "" if known else price["kind"]
        note = "with 8 vCPU" if "vCPU" in price["source"] else note
        row = {
            "usd_per_hour": f"{number(price['usd'])} USD",
            "kind": price["kind"] if known else "on-demand",
            "seller": seller,
            "region": region,
            "source": source,
            "date": date,
            "note": note,
            "weak": price.get("confidence") == "low",
        }
        rows.append({k: v for k, v in row.items() if v})
    return row_of(device["id"], {"prices": rows}) if rows else None


def device_sources(hardware):
    """The sources that devices' rows name; those of prices stand with the prices."""
    of_prices = {name for *_, name in SELLERS.values()} - {"tpuprice"}  # TPUs' figures as well
    return {k: v for k, v in (hardware["sources"] | SOURCES).items() if k not in of_prices}


def write_prices(hardware):
    """prices.toml: a table a device, with the sources that its rows name."""
    tables = [t for d in hardware["accelerators"] if (t := price_row(d))]
    used = {name for *_, name in SELLERS.values()}
    known = {k: v for k, v in (hardware["sources"] | PRICE_SOURCES).items() if k in used}
    head = (
        "# US dollars per device-hour, as sellers stated them. `date` is the source's own, or\n"
        "# the day on which a source without one was read. `weak`: better sources say otherwise.\n"
        "# Which row a plan takes, and how to state your own: `memfit.catalog.prices`.\n"
    )
    (CATALOG / "prices.toml").write_text("\n".join([head, row_of("sources", known), *tables]))


def billions(value):
    """`8.03B`, `124.439808M`: as published, in the unit that reads best."""
    return f"{number(value)}B" if value >= 1 else f"{number(value * 1000)}M"


def architecture(model, model_type):
    """What memfit's families say beyond the sizes; a published fact of each family."""
    if model_type == "gpt2":
        return {
            "attention_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "activation": "gelu_new",
        }
    if model_type == "gpt_neox":
        return {
            "attention_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "parallel_residual": True,
            "rotary_dim": model["head_dim"] // 4,  # rotary_pct 0.25 in all of them
            "activation": "gelu_fast" if model["name"] == "gpt-neox-20b" else "gelu",
        }
    biases = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
    if model_type == "opt":
        narrow, after = model.get("word_embed_proj_dim"), not model.get("norm_before", True)
        odd = {"embedding_size": narrow} if narrow else {}
        return {**biases, "activation": "relu", **odd, **({"norm_after": True} if after else {})}
    if model_type == "t5":
        return {"encoder_layers": model["layers"], "activation": "gelu_new"}
    if model_type == "bloom":
        return {**biases, "activation": "gelu_fast", "alibi": True}
    if model_type == "mpt":
        return {"activation": "gelu", "alibi": True}
    if model_type == "falcon":
        one = {"shared_norm": True} if model["kv_heads"] == 1 else {}
        size = model["head_dim"]
        return {"parallel_residual": True, "rotary_dim": size, "activation": "gelu", **one}
    if model_type == "gpt_oss":
        facts = {k: model[k] for k in DETAILS if k in model}
        biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), True)
        rest = {"rotary_dim": model["head_dim"], "sliding_window": 128, "sinks": True}
        return {**facts, **biases, **rest}
    gated = gated_architecture(model, model_type)
    if gated is not None:
        return gated
    extra = {
        "mistral": {"sliding_window": 4096} if model["name"] == "Mistral-7B-v0.1" else {},
        "qwen2": {"attention_bias": True},
        "qwen3": {"qk_norm": True},
        "llama": {},
    }
    experts = {
        "mixtral": {"norm_top_k": True},
        "qwen2_moe": {"attention_bias": True},
        "qwen3_moe": {"qk_norm": True, "norm_top_k": True},
        "glm4_moe": {"attention_bias": True, "norm_top_k": True},
    }
    if model_type not in extra:
        facts = {k: model[k] for k in DETAILS if k in model}
        if model_type not in experts:
            return facts | routing_facts(model["name"], model_type)
        whole = 2 if model_type == "glm4_moe" else 1  # partial_rotary_factor 0.5
        return {**facts, "rotary_dim": model["head_dim"] // whole, **experts[model_type]}
    return {"rotary_dim": model["head_dim"], **extra[model_type]}


def gated_architecture(model, model_type):
    """The same of the gated families beside Llama's own; None for another family."""
    size, name = model["head_dim"], model["name"]
    plain = {"rotary_dim": size}
    tanh = {"activation": "gelu_pytorch_tanh"}
    if model_type == "phi3":
        window = {"sliding_window": 2047} if "4k" in name else {}
        return {"rotary_dim": size * 3 // 4 if name == "Phi-4-mini-instruct" else size, **window}
    if model_type == "stablelm":
        odd = {"qk_norm": True, "parallel_residual": True} if "12b" in name else {}
        odd |= {"attention_bias": True} if "1_6b" in name else {}
        return {"rotary_dim": size // 4, **odd}
    return {
        "phi": {
            **dict.fromkeys(("attention_bias", "output_bias", "mlp_bias", "head_bias"), True),
            "parallel_residual": True,
            "shared_norm": True,
            "rotary_dim": size * 2 // 5,
            "activation": "gelu_new",
        },
        "gemma": {**plain, **tanh},
        "gemma2": {
            **plain,
            **tanh,
            "sliding_window": 4096,
            "layer_kinds": ["sliding", ""],
            "attention_cap": 50.0,
            "logit_cap": 30.0,
        },
        "gemma3_text": {
            **plain,
            **tanh,
            "qk_norm": True,
            "sliding_window": 512 if name == "Gemma-3-1b-it" else 1024,
            "layer_kinds": ["sliding"] * 5 + [""],
        },
        "olmo2": {**plain, "qk_norm": True},
        "granite": {**plain, "logits_scaled": True},
        "smollm3": {**plain, "layer_kinds": ["", "", "", "unrotated"]},
    }.get(model_type)


def routing_facts(name, model_type):
    """How tokens choose experts: config.json of DeepSeek's models and of Kimi-K2."""
    if model_type == "deepseek_v2":
        groups = (1, 1) if name == "DeepSeek-V2-Lite" else (8, 3)
    elif model_type == "deepseek_v3":
        groups = (1, 1) if name.startswith("Kimi") else (8, 4)
    else:
        return {}
    shares = {"norm_top_k": True} if model_type == "deepseek_v3" else {}
    return {**shares, "n_group": groups[0], "topk_group": groups[1]}


def model_row(model):
    model_type = MODEL_TYPE_BY_LABEL.get(
        model["family"], MODEL_TYPE.get(model["arch"], model["arch"])
    )
    name = model["name"]
    key = FRIENDLY.get(name, re.sub(r"-hf$", "", name.lower()))
    aliases = {name.lower(), model["hf_id"].split("/")[-1].lower()} - {key}
    if name.startswith("Llama-3.1"):  # the hub renamed these; both names lead to them
        aliases.add(f"meta-llama/{name}".lower())
    source, recalled, _ = model["published_source"].partition(" (exact figure recalled")
    source, _, also = source.partition(" (recalled")
    experts = "n_experts" in model
    counted = model["transformers_meta_params"]
    notes = [model.get("mismatch_note", ""), model.get("active_note", "")]
    fields = {
        "name": name,
        "hub": model["hf_id"],
        "aliases": sorted(aliases),
        "label": model["family"],
        "model_type": model_type,
        "parameters": model["formula_total"],
        "active_parameters": model["formula_active"] if experts else None,
        "transformers_parameters": counted,
        "layers": model["layers"],
        "hidden": model["hidden"],
        "heads": model["heads"],
        "kv_heads": model["kv_heads"],
        "head_dim": model["head_dim"],
        "ffn": model["ffn"],
        "vocab": model["vocab"],
        "max_sequence": model["max_seq"],
        "tied_embeddings": model["tied_embeddings"],
        "details": architecture(model, model_type) or None,
        "published": billions(model["published_total_b"]),
        "published_active": billions(model["published_active_b"]) if experts else None,
        "published_source": source,
        "source": model["config_source"],
        "unverified": ["published"] if recalled or also else [],
        "notes": "; ".join(n for n in notes if n) or None,
        "checked": CHECKED,
    }
    return row_of(key, fields)


def main(hardware_file, models_file):
    hardware = json.loads(Path(hardware_file).read_text())
    models = json.loads(Path(models_file).read_text())
    every = hardware["accelerators"]
    devices = [
        "# Accelerators: one row is one device of torch's. FLOP/s are dense. `memory` is what\n"
        "# torch can use, `memory_driver` what the driver prints, `memory_datasheet` what is on\n"
        "# the box. A line that is missing is unknown; `unverified` names fields of weak source.\n",
        row_of("sources", device_sources(hardware)),
        *(device_row(d, every) for d in with_added(every)),
    ]
    (CATALOG / "devices.toml").write_text("\n".join(devices))
    write_prices(hardware)
    rows = [
        "# Models. `parameters` is exact (tied weights once); `transformers_parameters` is what\n"
        "# transformers 5.23.0 counted on the meta device; `published` is the publisher's figure.\n"
        "# `details` holds what the family's file needs, or the facts of a family without one.\n",
        *(model_row(m) for m in models["models"]),
    ]
    (CATALOG / "models.toml").write_text("\n".join(rows))
    print(f"{len(every)} devices, {len(models['models'])} models")


if __name__ == "__main__":
    main(*sys.argv[1:])
