"""Python programs that make a trainer, read as the configuration that says the same."""

import json
import textwrap
import time

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.records.ledger import Kind

DEVICE = {"hardware": {"device": "a100-sxm-80"}}
HEAD = """
import os, torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer,
                          TrainingArguments)
from trl import (DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig,
                 SFTTrainer)
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("qwen3-0.6b")
tokenizer.pad_token = tokenizer.eos_token
"""
SFT = """
model_name_or_path: qwen3-0.6b
max_length: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
num_train_epochs: 1
bf16: true
"""
ADAPTED = "use_peft: true\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.05\n"
ARGUMENTS = ("max_length=512, per_device_train_batch_size=2, gradient_accumulation_steps=4,"
             " num_train_epochs=1, bf16=True")  # fmt: skip
BITS = """
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                          bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True)
"""
# the program behind its imports, and TRL's file that says the same
SAME = {
    "a name, and arguments": (
        f"SFTTrainer(model='qwen3-0.6b', args=SFTConfig('out', {ARGUMENTS}), train_dataset=ds)",
        SFT),
    "names, arithmetic, a dictionary and f-strings": (
        "SIZE, N = 0.6, 2\nkw = dict(num_train_epochs=1)\ncommon = {'bf16': True, 'max_length': 2 *"
        " 256}\nname = f'qwen3-{SIZE}b'\nargs = SFTConfig(output_dir=f'{name}-out', **common,\n"
        " per_device_train_batch_size=N, gradient_accumulation_steps=8 // N, num_train_epochs=1,\n"
        " learning_rate=float(os.environ['LR']))\ntrainer = SFTTrainer(name, args, None, ds)\n"
        "trainer.train()", SFT),
    "adapters over four bits": (
        f"{BITS}def main(epochs=1):\n    model = AutoModelForCausalLM.from_pretrained('qwen3-0.6b',"
        " quantization_config=bits,\n        torch_dtype=torch.bfloat16, device_map='auto',"
        " trust_remote_code=True)\n    model.config.use_cache = False\n    lora = LoraConfig(r=16,"
        " lora_alpha=32, lora_dropout=0.05, bias='none', task_type='CAUSAL_LM',\n        "
        "target_modules=['q_proj', 'v_proj'])\n    args = SFTConfig(output_dir='out',"
        f" {ARGUMENTS.replace('epochs=1', 'epochs=epochs')})\n    args.optim = 'paged_adamw_8bit'\n"
        "    SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=lora).train()\n"
        "if __name__ == '__main__':\n    main()",
        SFT + ADAPTED + "lora_target_modules: [q_proj, v_proj]\nload_in_4bit: true\ndtype: bfloat16"
        "\nuse_bnb_nested_quant: true\noptim: paged_adamw_8bit\n"),
    "adapters of a function, of a class of settings": (
        "class CFG:\n    rank = 16\n    rows: int = 2\ndef load(name, kernel='sdpa'):\n    return"
        " AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32,"
        " attn_implementation=kernel), None\nmodel, _ = load('qwen3-0.6b')\nmodel = get_peft_model("
        "model, LoraConfig(r=CFG.rank, lora_alpha=2 * CFG.rank, lora_dropout=0.05))\n"
        "model.print_trainable_parameters()\nargs = SFTConfig('out',"
        f" {ARGUMENTS.replace('size=2', 'size=CFG.rows')})\nSFTTrainer(model, args=args)",
        SFT + ADAPTED + "attn_implementation: sdpa\n"),
    "the defaults of argparse, and what a GPU can": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--max-length', type=int,"
        " default=512)\np.add_argument('--model', default='')\n"
        "p.add_argument('--lora', action='store_true')\na = p.parse_args()\n"
        "half = torch.cuda.is_bf16_supported()\nlora = LoraConfig() if a.lora else None\n"
        "SFTTrainer(a.model or 'qwen3-0.6b', SFTConfig('out', max_length=a.max_length, bf16=half,"
        " fp16=not half, per_device_train_batch_size=2, gradient_accumulation_steps=4,"
        " num_train_epochs=1), peft_config=lora)", SFT + "fp16: false\n"),
    "a class by another name": (
        f"from trl import SFTTrainer as Base\nBase('qwen3-0.6b', SFTConfig('out', {ARGUMENTS}))",
        SFT),
    "a reference that is a copy": (
        "m = AutoModelForCausalLM.from_pretrained('qwen3-0.6b', dtype='float32')\nref ="
        " AutoModelForCausalLM.from_pretrained('qwen3-0.6b', dtype='float32')\n"
        f"DPOTrainer(m, ref, args=DPOConfig('out', beta=0.2, {ARGUMENTS}), train_dataset=ds)",
        SFT + "beta: 0.2\n"),
    "answers that functions judge": (
        "def reward_length(completions, **kw):\n    return [-len(c) for c in completions]\n"
        "GRPOTrainer(model='qwen3-0.6b', reward_funcs=[reward_length], args=GRPOConfig('out',"
        " num_generations=4, max_completion_length=256, per_device_train_batch_size=4,"
        " num_train_epochs=1, bf16=True, gradient_accumulation_steps=4), train_dataset=ds)",
        "model_name_or_path: qwen3-0.6b\nnum_generations: 4\nmax_completion_length: 256\n"
        "per_device_train_batch_size: 4\nnum_train_epochs: 1\nbf16: true\n"
        "gradient_accumulation_steps: 4\n"),
}  # fmt: skip
OBJECTIVES = {"a reference that is a copy": "dpo"}  # that a file does not say


def write(folder, text, name="train.py"):
    file = folder / name
    file.write_text(HEAD + text)
    return file


def ask(folder, text, name="train.py", **more):
    return api.check([write(folder, text, name)], {**DEVICE, **more})


@pytest.mark.parametrize("name", SAME)
def test_a_program_is_read_as_the_file_that_says_the_same(name, tmp_path):
    text, file = SAME[name]
    (tmp_path / "trl.yaml").write_text(file)
    task = {"task": {"objective": OBJECTIVES[name]}} if name in OBJECTIVES else {}
    expected, plan = api.check([tmp_path / "trl.yaml"], {**DEVICE, **task})
    found, own = ask(tmp_path, text)
    assert found.request == expected.request
    assert own.memory.needed == plan.memory.needed
    assert not found.undescribed


def test_a_script_starts_a_program_with_arguments_of_the_programs_own(tmp_path):
    text = SAME["the defaults of argparse, and what a GPU can"][0]
    write(tmp_path, text)
    script = tmp_path / "run.sh"
    two = {"hardware": {"device": "a100-sxm-80", "count": 2}}
    for line, length, method in (
        ("python train.py --max-length 384 --lora", 384, "lora"), ("python train.py", 512, "full"),
        ("accelerate launch --num_processes 2 train.py --max-length=256", 256, "full"),
    ):  # fmt: skip
        script.write_text(f"pip install -r requirements.txt\npython setup.py\n{line}\n")
        request = api.check([script], two)[0].request
        assert (request.task.sequence_length, request.method) == (length, method)


def test_a_notebook_is_its_cells_of_code(tmp_path):
    text = SAME["adapters over four bits"][0]
    cells = ["!pip install trl\n%matplotlib inline\n" + HEAD, "%%bash\nls ((", *text.split("\n\n")]
    code = [{"cell_type": "code", "source": one.splitlines(keepends=True)} for one in cells]
    data = {"cells": [{"cell_type": "markdown", "source": "# not ( code"}, *code]}
    notebook = tmp_path / "train.ipynb"
    notebook.write_text(json.dumps(data))
    assert api.check([notebook], DEVICE)[0].request == ask(tmp_path, text)[0].request


def test_transformers_own_trainer_has_its_own_defaults_and_rows_as_the_program_cuts_them(tmp_path):
    text = (
        "def cut(x):\n    return tokenizer(x['text'], truncation=True, max_length=384)\n"
        "ds = ds.map(cut)\nmodel = AutoModelForCausalLM.from_pretrained('qwen3-0.6b',"
        " torch_dtype='float32')\nmodel = get_peft_model(model, LoraConfig(target_modules="
        "['q_proj']))\nargs = TrainingArguments('out', per_device_train_batch_size=3, bf16=True)\n"
        "Trainer(model=model, args=args, train_dataset=ds).train()\n"
    )
    checked, plan = ask(tmp_path, f"def main():\n{textwrap.indent(text, '    ')}main()")
    recipe = plan.recipe
    assert (recipe.framework, recipe.sequence_length, recipe.micro_batch) == ("hf-trainer", 384, 3)
    assert (recipe.recompute_blocks, recipe.lora.rank, recipe.lora.alpha) == (0, 8, 8.0)
    assert (recipe.precision, recipe.base_format) == ("bf16-mixed", "fp32")
    assert "loss" not in checked.request.options
    loose = text.replace(", max_length=384", "")
    with pytest.raises(InvalidRequest, match="does not say how long rows are") as refused:
        ask(tmp_path, loose)
    assert refused.value.hint == "`--set task.sequence_length=N` states their tokens"
    assert ask(tmp_path, loose, task={"sequence_length": 96})[1].recipe.sequence_length == 96
    more = text.replace("bf16=True", "gradient_checkpointing=True, bf16=True")
    assert ask(tmp_path, more)[1].recipe.recompute_blocks == 28


@pytest.mark.parametrize(
    ("text", "keys"),
    [("for p in model.parameters():\n    p.requires_grad = False", {"requires_grad": "weights"}),
     ("model = model.half()", {"dtype": "nothing"}),
     ("model = prepare_model_for_kbit_training(model)",
      {"prepare_model_for_kbit_training": "nothing"}),
     ("class Mine(SFTTrainer):\n    def compute_loss(self, *a): ...\nSFTTrainer = Mine", {}),
     ("", {})],
)  # fmt: skip
def test_what_a_program_does_to_the_model_is_not_passed_over(text, keys, tmp_path):
    load = "model = AutoModelForCausalLM.from_pretrained('qwen3-0.6b', dtype='float32')\n"
    checked, _ = ask(tmp_path, f"{load}{text}\nSFTTrainer(model, SFTConfig('out', {ARGUMENTS}))")
    assert {one.key: one.least for one in checked.undescribed} == keys


@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
def test_a_quantised_base_is_made_fp32_around_its_products_where_the_program_asks_for_it(
    trainer, tmp_path
):
    found = {}
    for call in ("", "model = prepare_model_for_kbit_training(model)\n"):
        text = (
            f"{BITS}\nmodel = AutoModelForCausalLM.from_pretrained('qwen3-0.6b', dtype='bfloat16',"
            f" quantization_config=bits)\n{call}lora = LoraConfig(target_modules='all-linear')\n"
            "model = get_peft_model(model, lora)\nrows = tokenizer(text, truncation=True,"
            " max_length=256)\nargs = TrainingArguments('out', per_device_train_batch_size=1,"
            f" bf16=True, gradient_checkpointing=True)\n{trainer}(model=model, args=args)\n"
        )
        checked, plan = ask(tmp_path, text, task={"sequence_length": 256})
        assert not checked.undescribed
        found[bool(call)] = sum(
            one.nbytes for one in plan.memory.entries if one.kind == Kind.PARAMETERS
        )
    embedding = 151936 * 1024  # of 16 bits, and of 32
    assert 2 * embedding <= found[True] - found[False] <= 2.01 * embedding


def test_what_is_not_described_or_another_model_is_named(tmp_path):
    text = f"""
class Mine(SFTTrainer):
    pass
lora = LoraConfig(rank_pattern={{'q_proj': 4}}, use_dora=True)
bits = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained('qwen3-0.6b', quantization_config=bits)
Mine(model, SFTConfig('out', {ARGUMENTS}), peft_config=lora, optimizers=(opt, None))
"""
    checked, plan = ask(tmp_path, text)
    assert any("as transformers 5 does" in line for line in checked.assumed)
    assert {one.key for one in checked.undescribed} >= {
        "class Mine", "rank_pattern", "optimizers", "bnb_4bit_compute_dtype"}  # fmt: skip
    assert plan.recipe.base_format == "fp4"  # bitsandbytes' own default
    teacher = "AutoModelForCausalLM.from_pretrained('qwen3-8b')"
    text = f"DPOTrainer('qwen3-0.6b', {teacher}, args=DPOConfig('out', {ARGUMENTS}))"
    assert [one.key for one in ask(tmp_path, text)[0].undescribed] == ["ref_model"]
    text = "GRPOTrainer('qwen3-0.6b', 'org/judge', args=GRPOConfig('out', bf16=True))"
    assert [one.key for one in ask(tmp_path, text)[0].undescribed] == ["reward_model_path"]


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [(f"SFTTrainer(args.model, SFTConfig('out', {ARGUMENTS}))", "`args.model`, which is known",
      "--set model="),
     (f"SFTTrainer('gpt2', SFTConfig('out', {ARGUMENTS.replace('512', 'len(ds)')}))",
      "`max_length` of `SFTTrainer` in", "--set task.sequence_length="),
     ("n = 1 if ds else 2\nSFTTrainer('gpt2', SFTConfig('out', group_by=n, pack=1, packing=n))",
      "is `1 if ds else 2`, which is known", "write its value"),
     ("if ds:\n    n = 1\nelse:\n    n = 2\nSFTTrainer('gpt2',"
      " SFTConfig('out', per_device_train_batch_size=n))", "is `n, by `if ds``", "micro_batch="),
     (f"args = SFTConfig('out', {ARGUMENTS})\nif ds:\n    args.max_length = 64\n"
      "SFTTrainer('gpt2', args)", "is `args.max_length, by `if ds``", "task.sequence_length="),
     ("from transformers import HfArgumentParser\nargs, = HfArgumentParser(SFTConfig)"
      ".parse_args_into_dataclasses()\nSFTTrainer('gpt2', args)", "given `args=args`",
      "name the shell script"),
     ("SFTTrainer('gpt2', SFTConfig('out'))\nDPOTrainer('gpt2', None, DPOConfig('o'))",
      "makes 2 trainers: `SFTTrainer`, `DPOTrainer`", "a file of its own"),
     (f"KTOTrainer('gpt2', args=KTOConfig('out', {ARGUMENTS}))", "memfit describes how it",
      "framework: memfit"),
     ("def f(x):\n    return f(x) + f(x)\nSFTTrainer(f(1), SFTConfig('out'))",
      "`model_name_or_path` of `SFTTrainer`", "--set model="),
     ("def f0(): pass\n" + "".join(f"def f{n + 1}():\n    " + 4 * f"f{n}();" + "\n"
                                   for n in range(12)) + "SFTTrainer(f12(), SFTConfig('out'))",
      "is too long to be read", ""),
     ("x = 'ab'\n" + "x = f'{x}{x}'\n" * 60 + "SFTTrainer(x, SFTConfig('out'))",
      "`model_name_or_path` of `SFTTrainer`", "--set model="),
     ("x = " + "(" * 300 + "SFTTrainer('gpt2')", "cannot read", ""),
     ("model = " + "-" * 4000 + "1\nSFTTrainer('gpt2')", "nests too deeply", "")],
)  # fmt: skip
def test_what_is_known_where_it_runs_is_asked_for(text, said, hint, tmp_path):
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match=said.replace("(", r"\(")) as refused:
        ask(tmp_path, text)
    assert hint in refused.value.hint
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "`.*train.py` is empty"), ("def f(:", r"invalid syntax \(train.py, line 1\)")],
)
def test_a_file_without_a_program_says_so(text, said, tmp_path):
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        api.check([tmp_path / "train.py"], DEVICE)


def test_what_the_command_line_states_need_not_be_known(tmp_path):
    text = "SFTTrainer(args.model, SFTConfig('out', bf16=True, max_length=args.n))"
    checked, _ = ask(tmp_path, text, model="qwen3-0.6b", task={"sequence_length": 64})
    assert checked.request.task.sequence_length == 64


def test_a_way_out_is_an_argument_of_the_program(tmp_path):
    text = f"SFTTrainer('qwen3-0.6b', SFTConfig('out', {ARGUMENTS}, gradient_checkpointing=False))"
    small = {**DEVICE, "limits": {"memory": "9 GiB"}}
    file = write(tmp_path, text)
    _, plan = api.check([file], small)
    assert plan.memory.verdict == "does_not_fit"
    changes = api.find_changes([file], small, plan)
    assert any("dtype" in str(change) for change in changes)


@pytest.mark.parametrize("name", ["train.py", "trl.yaml"])
def test_a_program_in_the_place_of_a_request_is_sent_to_check(name, tmp_path):
    file = tmp_path / name
    file.write_text(SFT if name == "trl.yaml" else HEAD)
    with pytest.raises(InvalidRequest, match="is another trainer's") as refused:
        api.read(file)
    assert f"`memfit check {file}`" in refused.value.hint
