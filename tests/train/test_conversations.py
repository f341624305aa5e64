"""Chats and pairs in every format; transformers' own rendering and masks are the oracle."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from msgspec.structs import replace
from tiny_runs import tiny_recipe
from torch.nn.functional import cross_entropy

from memfit.core.errors import InvalidRequest
from memfit.records.model import ModelReference
from memfit.records.request import Request, Task
from memfit.train.data.readers import find_sources
from memfit.train.data.sampler import build_rows
from memfit.train.data.shards.split import read_texts
from memfit.train.data.tokenizer import read_tokenizer, train_tokenizer
from memfit.train.data.tokens import read_corpus
from memfit.train.run.loop import train
from memfit.train.step.build import build_model, fill_weights

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Only the last answer keeps what was thought: earlier turns are written anew.
REWRITING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}[thought]{% endif %}"
    "{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another?"},
    {"role": "assistant", "content": "Green."},
]
ONE = [TALK[1], TALK[2]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(["name a colour: blue, green. another? be brief " * 20], 300, folder)


@pytest.fixture
def with_template(plain, tmp_path):
    def make(template):
        folder = tmp_path / "chatty"
        plain.save(folder)
        (folder / "chat_template.jinja").write_text(template)
        return read_tokenizer(str(folder))

    return make


@pytest.fixture
def read(tmp_path):
    def run(records, tokenizer, objective="sft"):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return read_corpus(find_sources(str(path)), tokenizer, objective, tmp_path / "cache")

    return run


def documents(corpus):
    return [
        (corpus.tokens[a:b].tolist(), corpus.learned[a:b].tolist())
        for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)
    ]


def masked_by_transformers(tokenizer, messages):
    made = tokenizer.wrapped.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(made["input_ids"]), list(made["assistant_masks"])


@pytest.mark.parametrize("talk", [TALK, ONE, TALK[:-1]], ids=["two turns", "one turn", "no last"])
def test_a_template_that_marks_answers_is_believed(talk, with_template, read):
    tokenizer = with_template(MARKED)
    (found,) = documents(read([{"messages": talk}], tokenizer))
    assert found == masked_by_transformers(tokenizer, talk)


def test_prefixes_find_the_same_answers_as_marks(with_template, read):
    (marked,) = documents(read([{"messages": TALK}], with_template(MARKED)))
    (compared,) = documents(read([{"messages": TALK}], with_template(PLAIN)))
    assert marked == compared
    assert sum(marked[1]) > 2


def test_a_template_that_rewrites_turns_is_refused_unless_the_answer_is_last(with_template, read):
    tokenizer = with_template(REWRITING)
    with pytest.raises(InvalidRequest, match=r"line 1: the chat template .* rewrites earlier"):
        read([{"messages": TALK}], tokenizer)
    ((ids, flags),) = documents(read([{"messages": ONE}], tokenizer))
    learned = [i for i, flag in zip(ids, flags, strict=True) if flag]
    assert tokenizer.wrapped.decode(learned) == "[thought]Blue.<|endoftext|>"


def test_a_template_that_marks_another_number_of_answers_is_refused(with_template, read):
    once = MARKED.replace("{% if m.role == 'assistant' %}", "{% if loop.last %}")
    with pytest.raises(InvalidRequest, match="marks 1 answers as generated"):
        read([{"messages": TALK}], with_template(once))


WITH_A_NAME = PLAIN.replace("{{ m.role }}", "{{ m.role }}{{ m.name or '' }}")


def test_a_prompt_of_messages_with_further_keys_is_what_transformers_renders(with_template):
    assert WITH_A_NAME != PLAIN
    tokenizer = with_template(WITH_A_NAME)
    named = [{**TALK[1], "name": " Ada"}]
    for messages in (TALK[:2], named):
        whole = tokenizer.wrapped.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.ask(messages) == whole
    assert " Ada" in tokenizer.ask(named)


SAME = {
    "messages": {"messages": ONE},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "Name a colour."}, {"from": "gpt", "value": "Blue."},
        ]
    },
    "sharegpt with OpenAI's keys": {"conversations": ONE},
    "alpaca": {"instruction": "Name a colour.", "output": "Blue."},
    "alpaca with an empty input": {"instruction": "Name a colour.", "input": "", "output": "Blue."},
    "prompt and completion of messages": {"prompt": ONE[:1], "completion": ONE[1:]},
}  # fmt: skip


@pytest.mark.parametrize("record", SAME.values(), ids=SAME)
def test_every_format_of_a_turn_gives_the_same_tokens(record, with_template, read):
    tokenizer = with_template(PLAIN)
    (found,) = documents(read([record], tokenizer))
    (wanted,) = documents(read([{"messages": ONE}], tokenizer))
    assert found == wanted


def test_alpaca_joins_its_input_and_needs_no_template(plain, with_template, read):
    record = {"instruction": "Translate.", "input": "bleu", "output": "blue"}
    ((ids, flags),) = documents(read([record], plain))
    prompt = plain.encode("Translate.\n\nbleu\n\n")
    assert ids == [*prompt, *plain.encode("blue"), plain.end]
    assert flags == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    chatty = with_template(PLAIN)
    (found,) = documents(read([record], chatty))
    talk = [{"role": "user", "content": "Translate.\n\nbleu"},
            {"role": "assistant", "content": "blue"}]  # fmt: skip
    assert found[0] == chatty.wrapped.apply_chat_template(talk, return_dict=True)["input_ids"]


def test_roles_of_sharegpt_are_known_whatever_their_letters(with_template, read):
    turns = [{"from": "System", "value": "Be brief."}, {"from": "Human", "value": "Name a colour."},
             {"from": "GPT", "value": "Blue."}]  # fmt: skip
    tokenizer = with_template(PLAIN)
    (found,) = documents(read([{"conversations": turns}], tokenizer))
    (wanted,) = documents(read([{"messages": TALK[:3]}], tokenizer))
    assert found == wanted


def test_packed_and_unpacked_rows_learn_the_same_tokens(with_template, read):
    corpus = read([{"messages": TALK}, {"messages": ONE}] * 3, with_template(PLAIN))
    learned = []
    for packing in (True, False):
        rows, _ = build_rows(
            corpus, objective="sft", packing=packing, width=160, seed=0, name="data"
        )
        pieces = [p for i in range(int(rows.per_epoch)) for p in rows.row(i, once=True)]
        assert all(p.start == 0 for p in pieces)
        learned.append(sorted((p.document, p.stop) for p in pieces))
    assert learned[0] == learned[1]
    assert len(learned[0]) == 6


def test_a_pair_is_two_documents_of_which_the_answers_are_learned(plain, read):
    record = {"prompt": "name a colour: ", "chosen": "blue", "rejected": "another"}
    chosen, rejected = documents(read([record], plain, "dpo"))
    prompt = plain.encode("name a colour: ")
    for (ids, flags), answer in ((chosen, "blue"), (rejected, "another")):
        assert ids == [*prompt, *plain.encode(answer), plain.end]
        assert flags == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


OTHER = {"role": "assistant", "content": "Grey, I think."}
PAIRS = {
    "prompt of messages": {"prompt": TALK[:4], "chosen": [TALK[4]], "rejected": [OTHER]},
    "prompt within the answers": {"chosen": TALK, "rejected": [*TALK[:4], OTHER]},
    "prompt in both": {"prompt": TALK[:4], "chosen": TALK, "rejected": [*TALK[:4], OTHER]},
}


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_of_pairs_of_messages_only_what_differs_is_learned(record, template, with_template, read):
    tokenizer = with_template(template)
    found = documents(read([record], tokenizer, "dpo"))
    for (ids, flags), last in zip(found, (TALK[4], OTHER), strict=True):
        talk = [*TALK[:4], last]
        assert ids == tokenizer.wrapped.apply_chat_template(talk, return_dict=True)["input_ids"]
        learned = [i for i, flag in zip(ids, flags, strict=True) if flag]
        assert tokenizer.wrapped.decode(learned) == f"{last['content']}<|endoftext|>"


def test_pairs_in_parquet_are_read(with_template, tmp_path):
    path = tmp_path / "pairs.parquet"
    record = PAIRS["prompt of messages"]
    pyarrow.parquet.write_table(pyarrow.table({k: [v] for k, v in record.items()}), path)
    corpus = read_corpus(find_sources(str(path)), with_template(PLAIN), "dpo", tmp_path / "cache")
    assert corpus.documents == 2
    assert np.asarray(corpus.learned).any()


def test_texts_of_every_format_teach_a_tokenizer(tmp_path):
    path = tmp_path / "all.jsonl"
    records = [*SAME.values(), {"prompt": "p", "chosen": "c", "rejected": "r"}, {"text": "t"}]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    texts = list(read_texts(find_sources(str(path))))
    assert texts[-3:] == ["pc", "pr", "t"]
    assert texts.count("Blue.") == 4


BAD = {
    "a role that nobody has": (
        "sft", {"conversations": [{"from": "alien", "value": "Hi"}]},
        r"line 2: `conversations\[0\]\.from` is `alien`",
    ),
    "a value that is no text": (
        "sft", {"conversations": [{"from": "human", "value": 3}]},
        r"line 2: `conversations\[0\]\.value` is a int, not a text",
    ),
    "content in parts": (
        "sft", {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"line 2: `messages\[0\]\.content` is a list, not a text",
    ),
    "a message that is none": (
        "sft", {"messages": ["Hi"]}, r"line 2: `messages\[0\]` is a str, not an object",
    ),
    "an output that is empty": (
        "sft", {"instruction": "a", "output": ""}, r"line 2: `output` is empty",
    ),
    "a pair under sft": (
        "sft", {"prompt": "a", "chosen": "b", "rejected": "c"}, r"line 2 is a pair of answers",
    ),
    "no pair under dpo": (
        "dpo", {"prompt": "a", "completion": "b"},
        r"line 2 is no pair of answers: it holds prompt, completion",
    ),
    "equal answers": (
        "dpo", {"prompt": "a", "chosen": "b", "rejected": "b"},
        r"line 2: `chosen` and `rejected` are equal",
    ),
    "answers to nothing": (
        "dpo", {"chosen": "b", "rejected": "c"}, r"line 2: `chosen` is a text, and there is no",
    ),
    "an answer of the user": (
        "dpo", {"prompt": ONE[:1], "chosen": [TALK[3]], "rejected": [OTHER]},
        r"line 2 has no answer to learn",
    ),
}  # fmt: skip
GOOD = {"sft": {"messages": ONE}, "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"}}


@pytest.mark.parametrize(("objective", "record", "said"), BAD.values(), ids=BAD)
def test_a_wrong_row_is_named_by_its_line_and_field(objective, record, said, with_template, read):
    with pytest.raises(InvalidRequest, match=said):
        read([GOOD[objective], record], with_template(PLAIN), objective)


CONFIG = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("packing", [False, True], ids=["a row each", "packed"])
def test_a_run_learns_what_transformers_masks(packing, with_template, tmp_path):
    tokenizer = with_template(MARKED)
    talks = [[TALK[0], {**TALK[1], "content": f"Name colour {n}."}, TALK[2]] for n in range(4)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    recipe = tiny_recipe(
        model=ModelReference(name="tiny", source="", config=CONFIG), objective="sft",
        packing=packing, sequence_length=256, micro_batch=1, accumulation=4 if not packing else 2,
        steps=1, optimizer={"clip_norm": 0.0},
    )  # fmt: skip
    task = Task(objective="sft", data=str(path), packing=packing)
    asked = Request(model=CONFIG, task=task, tokenizer=tokenizer.source)
    if packing:
        rows, _ = build_rows(
            read_corpus(find_sources(str(path)), tokenizer, "sft", tmp_path / "cache"),
            objective="sft", packing=True, width=256, seed=0, name="data",
        )  # fmt: skip
        recipe = replace(recipe, accumulation=int(rows.per_epoch))
    run = train(recipe, asked, tmp_path / "run", cache=tmp_path / "cache")
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    total, count = 0.0, 0
    for talk in talks:
        ids, masks = masked_by_transformers(tokenizer, talk)
        labels = torch.tensor([i if m else -100 for i, m in zip(ids, masks, strict=True)])
        logits = model(torch.tensor([ids])).logits[0, :-1]
        total += float(cross_entropy(logits, labels[1:], reduction="sum").detach())
        count += int((labels[1:] != -100).sum())
    assert run.losses[0][1] == pytest.approx(total / count, rel=1e-5)


WITH_TOOLS = (
    "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}{{ mood or '' }}"
    + PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
)
TOOLS = [{"type": "function", "function": {"name": "blend", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "blend", "arguments": {"a": "red"}}}],
}


@pytest.mark.parametrize("template", [WITH_TOOLS, "{{ tools | tojson if tools }}" + MARKED],
                         ids=["compared", "marked"])  # fmt: skip
@pytest.mark.parametrize("written", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON"])
def test_tools_stand_where_the_template_puts_them(template, written, with_template, read):
    tokenizer = with_template(template)
    beside = {"tools": written, "chat_template_kwargs": {"mood": "calm"}}
    whole = tokenizer.wrapped.apply_chat_template(TALK, tools=TOOLS, mood="calm", tokenize=False)
    assert "blend" in whole
    ((ids, flags),) = documents(read([{"messages": TALK, **beside}], tokenizer))
    assert tokenizer.wrapped.decode(ids) == whole
    learned = [i for i, flag in zip(ids, flags, strict=True) if flag]
    assert tokenizer.wrapped.decode(learned) == "Blue.<|endoftext|>Green.<|endoftext|>"
    pair = {"prompt": ONE[:1], "chosen": ONE[1:], "rejected": TALK[-1:], **beside}
    for ids, _ in documents(read([pair], tokenizer, "dpo")):
        assert "blend" in tokenizer.wrapped.decode(ids)


def test_tools_that_are_no_list_are_refused_by_name(with_template, read):
    for wrong in ("not JSON", "{}", 7):
        with pytest.raises(InvalidRequest, match=r"line 1: `tools` is a"):
            read([{"messages": ONE, "tools": wrong}], with_template(PLAIN))


def test_a_message_that_calls_a_tool_needs_no_content(with_template, read, tmp_path):
    tokenizer = with_template(WITH_TOOLS)
    talk = [*ONE[:1], CALL, {"role": "tool", "content": "pink"}, ONE[1]]
    (found,) = documents(read([{"messages": talk}], tokenizer))
    (wanted,) = documents(read([{"messages": [talk[0], {**CALL, "content": None}, *talk[2:]]}],
                               tokenizer))  # fmt: skip
    assert found == wanted
    other = json.loads(json.dumps(talk).replace('"a": "red"', '"b": 1'))
    table = pyarrow.Table.from_pylist([{"messages": talk}, {"messages": other}])  # fills up a and b
    pyarrow.parquet.write_table(table, tmp_path / "calls.parquet")
    sources = find_sources(str(tmp_path / "calls.parquet"))
    first, second = documents(read_corpus(sources, tokenizer, "sft", tmp_path / "cache"))
    assert first == found
    assert '{"b": 1}' in tokenizer.wrapped.decode(second[0])


def test_an_answer_of_weight_0_is_not_learned(with_template, read):
    for template in (PLAIN, MARKED):
        tokenizer = with_template(template)
        talk = [*TALK[:2], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
        ((ids, flags),) = documents(read([{"messages": talk}], tokenizer))
        learned = [i for i, flag in zip(ids, flags, strict=True) if flag]
        assert tokenizer.wrapped.decode(learned) == "Green.<|endoftext|>"
        with pytest.raises(InvalidRequest, match=r"`messages\[1\].weight` is 0.5"):
            read([{"messages": [ONE[0], {**ONE[1], "weight": 0.5}]}], tokenizer)


BESIDE = {
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Name a colour."}, {"from": "gpt", "value": "Blue."},
            {"from": "human", "value": "Another?"}, {"from": "gpt", "value": "Green."},
        ],
    },
    "alpaca": {
        "system": "Be brief.", "history": [["Name a colour.", "Blue."]],
        "instruction": "Another?", "output": "Green.",
    },
    "messages": {"system": "Be brief.", "messages": TALK[1:]},
    "its own first": {"system": "Be long.", "messages": TALK},
}  # fmt: skip


@pytest.mark.parametrize("record", BESIDE.values(), ids=BESIDE)
def test_a_system_prompt_and_a_history_beside_a_turn_are_read(record, plain, with_template, read):
    tokenizer = with_template(PLAIN)
    (found,) = documents(read([record], tokenizer))
    (wanted,) = documents(read([{"messages": TALK}], tokenizer))
    assert found == wanted
    if "history" in record:
        with pytest.raises(InvalidRequest, match="has a `history`, and the tokenizer has no"):
            read([record], plain)


def test_data_of_empty_lines_has_no_examples(plain, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(InvalidRequest, match=r"empty\.jsonl`: no examples are in the data"):
        read_corpus(find_sources(str(tmp_path / "empty.jsonl")), plain, "sft", tmp_path / "cache")
