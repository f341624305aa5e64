"""Terminal screens: what they say, that they fit, that they need neither colour nor a terminal."""

import io
import shlex
from functools import cache, partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import made_by_hand as made
from memfit import api
from memfit.accuracy.corpus import Refused, home, read_corpus
from memfit.accuracy.memory_errors import compare as compare_rows
from memfit.core.number_formats import formats
from memfit.core.units import GIB, MIB
from memfit.core.wording import COLOURS, PHASES, VERDICTS, show_error, show_value
from memfit.records import from_data
from memfit.records.ledger import Entry, Kind, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request
from memfit.report.difference import compare
from memfit.report.join import join
from memfit.screens.accuracy import show_accuracy
from memfit.screens.certificate import show_certificate, show_nearest
from memfit.screens.diff import show_diff
from memfit.screens.formats import show_formats
from memfit.screens.plan import show_plan, split_labels
from memfit.screens.report import show_report
from memfit.screens.short import MOST, show_short
from memfit.screens.short_certificate import show_short_certificate
from memfit.screens.widgets import bar, chart, layout
from memfit.screens.widgets.terminal import (
    Column,
    Console,
    Styled,
    Table,
    cells,
    shows_colour,
    wrap,
)

LONG = "memfit plan llama-3.1-8b --device h100-sxm --memory '60 GiB' --set task.steps=100000 --why"


def screen(show, *things, width=80, encoding="utf-8", terminal=False, **keys):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file, width=width, colour=terminal)
    show(console, *things, **keys)
    file.flush()
    return raw.getvalue().decode(encoding)


@cache
def foreign_plan():
    request = {
        "model": "llama-3.1-8b", "framework": "torchtitan", "micro_batch": 2,
        "task": {"sequence_length": 8192, "global_batch": 16},
        "hardware": {"device": "h100-sxm", "count": 8},
    }  # fmt: skip
    return api.predict(from_data(request, Request, source="the test"))


@cache
def judged():
    """An accuracy with everything that its screen can show."""
    (one, *_) = read_corpus([home() / "cpu.jsonl"])
    replace = msgspec.structs.replace
    reserved = {"memory.peak_reserved": replace(one.measurements["memory.peak_allocated"])}
    plan = foreign_plan()
    recipe = plan.recipe
    titan = replace(one, id="titan-with-a-rather-long-name", recipe=recipe, measurements=reserved)
    unknown = {"memory.unspecified": reserved["memory.peak_reserved"]}
    rows = [
        one,
        titan,
        replace(titan, id="out", measurements={}, out_of_memory=True),
        replace(titan, id="unsaid", measurements=unknown),
    ]
    refused = Refused(reason="weights stored as ƒ are not described", source="a/b", rows=7)
    return compare_rows(rows, [refused])


def all_screens(**keys):
    fits = made.plan(data="text")
    miss = made.plan(usable=60 * GIB, verdict="does_not_fit")
    cpu = made.plan(cuda=False, verdict="unproven", usable=None)
    full = join(fits, made.certificate(fits), made.run(fits), sample="def ƒ():\n    return π")
    yield screen(show_plan, fits, commands=[LONG], **keys)
    yield screen(show_plan, miss, commands=["memfit plan"], **keys)
    yield screen(show_plan, cpu, commands=[], **keys)
    yield screen(show_certificate, made.certificate(fits, more=GIB), fits, commands=[LONG], **keys)
    yield screen(show_certificate, made.certificate(cpu), None, commands=[], **keys)
    proof, levers, nearest = made.certificate(miss), made.levers(), made.nearest(miss)
    yield screen(show_certificate, proof, miss, commands=[], levers=levers, nearest=nearest, **keys)
    yield screen(show_certificate, proof, miss, commands=[], **keys)
    for certificate, plan in ((proof, miss), (made.certificate(cpu), None)):
        yield screen(show_short_certificate, certificate, plan, commands=[LONG], **keys)
    yield screen(show_nearest, made.nearest(miss, fits=False), "h100-sxm", **keys)
    other = made.certificate(cpu, module="transformer.h.11.mlp.a_rather_long_name_of_a_module")
    yield screen(show_diff, compare(proof, other, names=("runs/a", "runs/b")), **keys)
    yield screen(show_report, full, commands=["memfit generate runs/a 'x'"], **keys)
    yield screen(show_report, join(fits, None, None), commands=[], **keys)
    yield screen(show_formats, 3.14159265, formats(3.14159265), **keys)
    yield screen(show_plan, foreign_plan(), commands=["memfit predict x.yaml --why"], **keys)
    yield screen(show_accuracy, judged(), ("source", "kind"), 5, **keys)


@pytest.mark.parametrize("width", [64, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal_or_ends_in_blanks(width):
    for text in all_screens(width=width):
        for line in text.splitlines():
            assert cell_len(line) <= width, line
            assert line == line.rstrip() or set(line) <= {" "}, line


def test_an_ascii_terminal_is_shown_ascii_only():
    for text in all_screens(encoding="ascii"):
        assert text.isascii()


def test_without_a_terminal_there_is_no_escape_sequence():
    for text in all_screens():
        assert "\x1b" not in text


def test_colour_adds_nothing_but_colour():
    """Whoever sees no colour reads the very same characters."""
    import re

    coloured = [re.sub(r"\x1b\[[0-9;]*m", "", t) for t in all_screens(terminal=True)]
    bare = [line.rstrip() for t in all_screens() for line in t.splitlines()]
    assert [line.rstrip() for t in coloured for line in t.splitlines()] == bare


@pytest.mark.parametrize(("verdict", "usable", "room"), [
    ("fits", 80, "of 80.00 GiB usable (94.7%): 4.21 GiB to spare"),
    ("at_risk", 75, "of 75.00 GiB usable (101.1%): 812.00 MiB too much"),
    ("does_not_fit", 60, "of 60.00 GiB usable (126.3%): 15.79 GiB too much"),
])  # fmt: skip
def test_the_first_lines_are_the_verdict_and_both_numbers(verdict, usable, room):
    plan = made.plan(usable=usable * GIB, verdict=verdict)
    first, second = screen(show_plan, plan, commands=[]).splitlines()[:2]
    assert first == f"{VERDICTS[verdict]}  llama-3.1-8b on h100-sxm"
    assert second.startswith("needs 75.79 GiB")
    assert second.endswith(room)


def test_unknown_is_shown_as_unknown_with_the_reason():
    plan = made.plan(usable=None, verdict="unproven")
    nothing = dict.fromkeys(
        ["step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "hfu",
         "total_seconds"]
    )  # fmt: skip
    time = msgspec.structs.replace(plan.time, **nothing, because="no bf16 FLOP/s is known")
    text = screen(show_plan, msgspec.structs.replace(plan, time=time), commands=[], width=120)
    assert "how much may be used is unknown" in text
    assert "one step         unknown" in text
    assert "cost             unknown, 1.63 kWh" in text
    assert "no bf16 FLOP/s is known; no price in the catalogue" in text


def test_the_breakdown_adds_up_to_what_is_needed():
    plan = made.plan()
    parts = bar_parts(plan)
    assert sum(parts.values()) == plan.memory.device_total
    assert parts["fragmentation"] == GIB


def test_entries_of_the_allocator_do_not_hide_what_it_reserves_beyond_them():
    plan = made.plan()
    rounding = Entry(
        kind=Kind.FRAGMENTATION, phase=Phase.BACKWARD, owner="rounding", nbytes=MIB,
        because="blocks are multiples of 512 B",
    )  # fmt: skip
    held = plan.memory
    held = msgspec.structs.replace(
        held, entries=(*held.entries, rounding), peak_allocated=held.peak_allocated + MIB,
        peak_reserved=held.peak_reserved + MIB, device_total=held.device_total + MIB,
    )  # fmt: skip
    changed = msgspec.structs.replace(plan, memory=held)
    assert sum(bar_parts(changed).values()) == held.device_total
    text = screen(show_plan, changed, commands=[], width=120)
    assert "beyond what is allocated; rounding: blocks" in " ".join(text.split())


def bar_parts(plan):
    from memfit.screens.widgets.memory import parts_of

    return dict(parts_of(plan.memory))


def test_a_miss_says_what_it_lacks_and_shows_only_levers_that_save():
    text = screen(show_plan, made.plan(usable=60 * GIB, verdict="does_not_fit"), commands=[])
    assert "nearest miss: needs 75.79 GiB but `h100-sxm` may use 60.00 GiB: parameters" in text
    levers = text.split("Levers that would help")[1].split("Assumed")[0]
    assert "precision=bf16" in levers
    assert "recompute=none" not in levers  # it would cost memory


def test_considered_says_what_all_share_once():
    common, rest = split_labels(
        ["full fp32, micro 1, loss plain", "full fp32, micro 2, loss plain"]
    )
    assert common == "full fp32, loss plain"
    assert rest == ["micro 1", "micro 2"]
    assert split_labels(["full fp32, micro 1"]) == ("", ["full fp32, micro 1"])


def test_the_chosen_row_carries_a_tick():
    text = screen(show_plan, made.plan(), commands=[], width=120)
    (chosen,) = [line for line in text.splitlines() if "✔" in line]
    assert "the fastest that fits" in chosen


def test_why_shows_every_entry():
    plan = made.plan()
    text = screen(show_plan, plan, commands=[], width=120)
    for entry in plan.memory.entries:
        assert entry.because[:30] in text


def test_a_certificate_shows_predicted_beside_certified_with_the_signed_error():
    plan = made.plan()
    text = screen(show_certificate, made.certificate(plan, more=GIB), plan, commands=[], width=120)
    _, row = [line for line in text.splitlines() if line.startswith("  gradients  ")]
    assert row.split() == ["gradients", "15.00", "GiB", "16.00", "GiB", "-6.25%"]
    assert "model.layers.31.mlp" in text
    assert "every document fills its sequence" in text


def test_every_screen_says_how_many_devices():
    plan = made.plan()
    recipe = msgspec.structs.replace(plan.recipe, parallel=Parallel(dp_shard=8))
    plan = msgspec.structs.replace(plan, recipe=recipe)
    certificate = msgspec.structs.replace(made.certificate(plan), recipe=recipe)
    for show, found in (
        (partial(show_plan, commands=[]), (plan,)),
        (partial(show_short, commands=[]), (plan,)),
        (partial(show_certificate, commands=[]), (certificate, plan)),
        (partial(show_short_certificate, commands=[]), (certificate, plan)),
    ):
        assert "llama-3.1-8b on 8 x h100-sxm" in screen(show, *found).splitlines()[0]
    for found in (plan, certificate):
        assert "llama-3.1-8b on 8 x h100-sxm: " in repr(found)
        assert "llama-3.1-8b on 8 x h100-sxm" in found._repr_html_()


@pytest.mark.parametrize("more", [0, GIB])
def test_a_certificate_is_24_lines_with_predicted_beside_certified(more):
    plan = made.plan()
    text = screen(
        show_short_certificate, made.certificate(plan, more=more), plan, commands=[LONG], width=80
    )
    lines = text.splitlines()
    assert len(lines) <= MOST
    assert max(map(cell_len, lines)) <= 80
    assert lines[0].startswith("FITS  ")
    (row,) = [line for line in lines if line.startswith("peak_allocated ")]
    assert ("(error 0)" in row) == (not more)
    assert "model.layers.31.mlp" in text
    assert "every document fills its sequence" in text
    assert "Next" in lines


def test_levers_and_the_nearest_recipe_stand_below_a_short_certificate():
    plan = made.plan(usable=60 * GIB, verdict="does_not_fit")
    keys = {"commands": [LONG], "levers": made.levers(), "nearest": made.nearest(plan)}
    text = screen(show_short_certificate, made.certificate(plan), plan, **keys, width=120)
    heads = ("DOES NOT FIT", "Largest tensors", "Levers (one", "The nearest recipe", "Next")
    places = [text.index(head) for head in heads]
    assert places == sorted(places)


def test_why_shows_every_tensor_with_its_line_and_each_lever_with_its_verdict():
    plan = made.plan(usable=60 * GIB, verdict="does_not_fit")
    keys = {"commands": [], "levers": made.levers(), "nearest": made.nearest(plan)}
    text = screen(show_certificate, made.certificate(plan), plan, **keys, width=120)
    assert "All 24 tensors alive at the peak" in text
    assert "2 x 768.00 MiB  activations  model.layers.31.mlp" in text
    assert "aten.mm  bfloat16 (1, 4096)  transformers/models/llama/modeling_llama.py:164" in text
    lines = [line for line in text.splitlines() if line.startswith("  recompute=full ")]
    assert lines[0].split()[1:7] == ["9.00", "GiB", "62.00", "GiB", "FITS"]
    (worse,) = [line for line in text.splitlines() if line.startswith("  attention=math ")]
    assert worse.split()[1:6] == ["-2.00", "GiB", "73.00", "GiB", "DOES"]
    (failed, _) = [line for line in text.splitlines() if line.startswith("  loss=chunked")]
    assert "unknown" in failed
    assert "NOT CERTIFIED" in failed
    assert "loss=chunked loss_chunk=1024: it failed" in text
    assert "precision=bf16 *  " in text
    assert "* changes what is learned" in text
    assert "--set 'recompute={blocks: 30}'" in text
    assert "+17.7% time a step (predicted); learns the same" in text


def test_generating_has_a_verdict_of_its_own_and_warnings_are_shown():
    plan = made.plan()
    certificate = made.certificate(plan)
    assert "Generating" not in screen(show_certificate, certificate, plan, commands=[])
    later = msgspec.structs.replace(certificate.memory, verdict="does_not_fit", because="by hand")
    certificate = msgspec.structs.replace(certificate, generation=later)
    shown = screen(show_certificate, certificate, plan, commands=[])
    assert "Generating, in a process of its own" in shown
    assert "DOES NOT FIT: needs" in shown
    run = msgspec.structs.replace(made.run(plan), warnings=("backward holds 2 GiB more",))
    assert "- backward holds 2 GiB more" in screen(
        show_report, join(plan, certificate, run), commands=[]
    )


def test_the_report_shows_three_sources_curve_and_sample():
    plan = made.plan()
    report = join(plan, made.certificate(plan), made.run(plan), sample="def answer():")
    text = screen(show_report, report, commands=[], width=120)
    (row,) = [line for line in text.splitlines() if line.startswith("  step_seconds")]
    assert row.split() == ["step_seconds", "8.4", "s", "-", "9.1", "s", "-7.69%", "-"]
    assert "Training loss: 7.905 -> 1.533" in text
    assert "def answer():" in text
    assert "200 of 1,000 steps (finished)" in text


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 2**40), min_size=1, max_size=6),
    line=st.none() | st.integers(1, 2**40),
    width=st.integers(8, 120),
)
def test_a_bar_is_exactly_as_wide_as_asked_and_marks_the_line(sizes, line, width):
    parts = list(zip(COLOURS, sizes, strict=False))
    drawn = "".join(s.text for s in bar.stacked_bar(parts, line=line, width=width))
    assert cell_len(drawn) == width
    assert drawn.count("|") == (line is not None)
    if line is not None:
        full = max(sum(sizes), line)
        assert drawn.index("|") == round(line / full * (width - 1))
    assert len(bar.scale(sum(sizes), line, width=width)[0].text) <= max(width, 24)


def test_every_kind_phase_and_verdict_has_its_word_fill_and_colour():
    from typing import get_args

    from memfit.records.results import Verdict

    assert set(bar.FILLS) == set(COLOURS) == {str(k) for k in Kind}
    assert set(PHASES) == {str(p) for p in Phase}
    assert set(VERDICTS) == set(layout.STYLES) == set(get_args(Verdict))
    for column in (0, 1):
        assert len({f[column] for f in bar.FILLS.values()}) == len(Kind)


def test_a_curve_falls_from_the_upper_left_to_the_lower_right():
    lines = chart.draw_curve([(s, 10 - s / 10) for s in range(100)], width=60, ascii_only=True)
    assert len(lines) == chart.HEIGHT + 2
    assert all(len(line) <= 60 for line in lines)
    assert lines[0].lstrip().startswith("10 |*")
    assert lines[chart.HEIGHT - 1].rstrip().endswith("*")
    assert lines[-1].split() == ["0", "step", "99"]


def test_a_short_curve_has_its_steps_apart():
    lines = chart.draw_curve([(1, 2.0), (2, 1.5), (3, 1.0)], width=60, ascii_only=True)
    assert lines[-1].split() == ["1", "3"]


def test_values_that_are_not_finite_are_counted_not_drawn():
    points = [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0)]
    lines = chart.draw_curve(points, width=40, ascii_only=True)
    assert lines[-1] == "2 values are not finite and are not drawn"
    assert chart.draw_curve([(1, float("nan"))], width=40, ascii_only=True) == ["no values"]


def test_a_long_command_is_continued_so_that_a_shell_reads_the_same():
    lines = layout.continue_lines(LONG, 40)
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(LONG)  # as sh does


@pytest.mark.parametrize(("value", "unit", "shown"), [
    (None, "s", "-"), (1.5 * GIB, "bytes", "1.50 GiB"), (3 * MIB, "B", "3.00 MiB"),
    (0.25, "s", "250 ms"), (0.412, "fraction of peak", "41.2%"), (7214.4, "tokens/s", "7,214"),
])  # fmt: skip
def test_values_carry_their_unit(value, unit, shown):
    assert show_value(value, unit) == shown


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (-0.0625, "-6.25%"),
        (0.5, "+50.00%"),
        (14.5, "15.5x"),
        (-1.3e-5, "<0.01%"),
        (3e-8, "<0.01%"),
    ],
)
def test_only_exact_equality_is_shown_as_nothing(error, shown):
    assert show_error(error) == shown


def test_a_sample_cannot_steer_the_terminal():
    plan = made.plan()
    report = join(plan, None, made.run(plan), sample="a\x1b[2Jb\x07c")
    assert "a\ufffd[2Jb\ufffdc" in screen(show_report, report, commands=[])


def test_an_estimate_is_marked_as_one():
    text = screen(show_plan, made.plan(), commands=[], width=120)
    rows = [line for line in text.splitlines() if "than there is" in line and "micro" in line]
    assert len(rows) == 3
    assert all("~105.29 GiB" in row for row in rows)
    assert "~ the search's estimate" in text
    exact = [line for line in text.splitlines() if "the fastest that fits" in line]
    assert "~" not in exact[0]


# the terminal itself; rich is the oracle of what is how wide

WORDS = st.text(st.sampled_from("ab cdé語π👍\u0301\n "), max_size=60)


@settings(max_examples=200)
@given(text=WORDS)
def test_a_text_is_as_wide_as_rich_says(text):
    assert cells(text.replace("\n", "")) == cell_len(text.replace("\n", ""))


@settings(max_examples=200)
@given(text=WORDS, width=st.integers(2, 30))
def test_wrapping_loses_no_character_but_blanks(text, width):
    lines = wrap(text, width)
    assert all(cells(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_words_are_broken_only_where_no_line_holds_them():
    assert wrap("one two three", 8) == ["one two", "three"]
    assert wrap("    indented code stays", 12) == ["    indented", "code stays"]
    assert wrap("ab verylongword", 6) == ["ab", "verylo", "ngword"]
    assert wrap("", 5) == [""]
    assert wrap("      ", 5) == ["     "]


def test_a_table_shrinks_what_may_be_wrapped_and_never_a_number():
    table = Table([Column("what", number=False), Column("bytes", number=True)])
    table.add_row("a long explanation of it", Styled("1,234,567 B", "bold"))
    lines = ["".join(s.text for s in line).rstrip() for line in table.lines(24)]
    assert lines == [
        "what               bytes",
        "a long       1,234,567 B",
        "explanation",
        "of it",
    ]


@pytest.mark.parametrize(("environment", "terminal", "shown"), [
    ({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False),
    ({"TERM": "dumb"}, True, False), ({"FORCE_COLOR": "1"}, False, True),
    ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
])  # fmt: skip
def test_colour_is_for_terminals_that_want_it(environment, terminal, shown):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    assert shows_colour(Stream(), environment) is shown
