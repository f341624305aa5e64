"""Number formats against torch's own casts."""

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfit.core.errors import InvalidRequest
from memfit.core.number_formats import FP4, NF4, formats
from memfit.records import to_json

TORCH = {
    "fp32": (torch.float32, torch.int32),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}
NAMES = [
    "fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2",
    "int8, no scale", "int8", "int4", "nf4", "fp4",
]  # fmt: skip
near = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitudes = st.one_of(
    near,
    st.floats(-70000, 70000, width=32),
    st.floats(-500, 500, width=32),
    st.floats(-0.03125, 0.03125, width=32),
    st.floats(-(2.0**-14), 2.0**-14, width=32),
)


def rows(x, **kw):
    return {r.name: r for r in formats(x, **kw)}


def test_every_format_of_the_question_has_a_row():
    assert [r.name for r in formats(1.0)] == NAMES
    bits = {r.name: r.bits for r in formats(1.0)}
    assert [bits[n] for n in NAMES] == [64, 32, 19, 16, 16, 8, 8, 8, 8, 4, 4, 4]
    assert all(r.sign + r.exponent + r.mantissa == r.bits for r in formats(1.0))


def test_pi_is_the_same_number_in_fp16_and_bf16():
    found = rows(math.pi)
    assert found["fp16"].stored == found["bf16"].stored == 3.140625
    assert found["fp16"].shown == "3.140625"
    assert found["bf16"].step == 8 * found["fp16"].step == 2.0**-6
    assert found["fp64"].absolute_error == 0


@pytest.mark.parametrize("name", list(TORCH))
@settings(max_examples=500)
@given(x=magnitudes)
@example(x=65519.99609375)
@example(x=65520.0)
@example(x=464.0)
@example(x=2.0**-24)
@example(x=2.0**-25)
@example(x=-0.0)
def test_the_stored_value_and_bits_are_torchs(name, x):
    dtype, bits = TORCH[name]
    row = rows(x)[name]
    if name == "fp8_e4m3" and abs(x) > 464:  # saturating or nan, by torch's version
        assert row.stored == math.copysign(448, x)
        return
    cast = torch.tensor([x], dtype=torch.float64 if name == "fp32" else torch.float32).to(dtype)
    assert row.stored == cast.double().item()
    assert math.copysign(1, row.stored) == math.copysign(1, x)
    code = cast.view(bits).item() % (1 << row.bits)
    assert int(row.encoding.replace(" ", ""), 2) == code


@settings(max_examples=500)
@given(x=st.floats(allow_nan=False, allow_infinity=False))
@example(x=3.4028235677973366e38)  # the tie between fp32's maximum and infinity
@example(x=3.4028235677973362e38)
@example(x=5e-324)
@example(x=1.7976931348623157e308)
def test_rounding_from_fp64_is_one_rounding(x):
    found = rows(x)
    assert found["fp64"].stored == x
    try:
        single = struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        single = math.copysign(math.inf, x)
    assert found["fp32"].stored == single


@settings(max_examples=500)
@given(x=near)
def test_tf32_drops_thirteen_bits_of_fp32_rounding_to_even(x):
    (code,) = struct.unpack("I", struct.pack("f", x))
    code = (code + 0xFFF + (code >> 13 & 1)) & ~0x1FFF & 0xFFFFFFFF
    (expected,) = struct.unpack("f", struct.pack("I", code))
    assert rows(x)["tf32"].stored == expected


@pytest.mark.parametrize("name", [*TORCH])
def test_ranges_are_torchs(name):
    info, row = torch.finfo(TORCH[name][0]), rows(1.0)[name]
    assert row.maximum == info.max
    assert row.smallest_normal == info.smallest_normal
    assert row.step == info.eps
    tiny = row.smallest_subnormal
    assert rows(tiny)[name].stored == tiny
    assert rows(tiny / 2)[name].stored == 0  # a tie, to even
    assert rows(tiny * 0.75)[name].stored == tiny


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
@settings(max_examples=300)
@given(x=magnitudes)
def test_the_error_is_at_most_half_a_step(name, x):
    row = rows(x)[name]
    if row.step is None:
        assert abs(x) > row.maximum
    else:
        assert row.absolute_error <= row.step / 2
        assert row.absolute_error == abs(x - row.stored)
        if x:
            assert row.relative_error == pytest.approx(row.absolute_error / abs(x), rel=1e-12)


def test_beyond_the_range_the_step_is_unknown_and_what_happens_is_said():
    found = rows(1e6)
    assert found["fp16"].stored == math.inf
    assert found["fp16"].shown == "inf"
    assert found["fp16"].step is None
    assert found["fp8_e4m3"].stored == 448
    assert "448" in found["fp8_e4m3"].note
    assert rows(-1e6)["fp8_e5m2"].stored == -math.inf


@settings(max_examples=300)
@given(x=st.floats(-10, 10), scale=st.floats(0.5, 10))
def test_integers_are_absmax_quantisation(x, scale):
    for name, top in (("int8", 127), ("int4", 7)):
        row = rows(x, scale=scale)[name]
        code = torch.clamp(
            torch.round(torch.tensor(x, dtype=torch.float64) / scale * top), -top, top
        )
        near_tie = abs(abs(x / scale * top) % 1 - 0.5) < 1e-9
        assert near_tie or row.stored == pytest.approx(code.item() * scale / top, rel=1e-12)
        assert (row.step is None) == (abs(x) > scale)
        if row.step:
            assert row.step == pytest.approx(scale / top)


@pytest.mark.parametrize(("name", "table"), [("nf4", NF4), ("fp4", FP4)])
@settings(max_examples=300)
@given(x=st.floats(-10, 10), scale=st.floats(0.5, 10))
def test_a_table_gives_its_nearest_entry(name, table, x, scale):
    row = rows(x, scale=scale)[name]
    least = min(abs(entry * scale - x) for entry in table)
    assert row.absolute_error == pytest.approx(least, abs=1e-12)
    assert any(row.stored == pytest.approx(entry * scale, abs=1e-12) for entry in table)


def test_the_tables_have_the_published_entries():
    assert len(NF4) == 16
    assert len(FP4) == 15  # two zeros are one value
    assert sorted(v * 6 for v in FP4) == pytest.approx(
        [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    )
    quantiles = torch.distributions.Normal(0, 1)  # QLoRA's construction, appendix E
    offset = 0.9677083
    positive = quantiles.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -quantiles.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    made = sorted([*positive.tolist(), 0.0, *negative.tolist()])
    assert [v / max(made) for v in made] == pytest.approx(list(NF4), abs=2e-7)


def test_alone_in_its_block_a_number_is_exact_and_the_row_says_so():
    for name in ("int8", "int4", "nf4", "fp4"):
        row = rows(-3.3)[name]
        assert row.stored == -3.3
        assert row.scale == 3.3
        assert "alone" in row.note
        assert "alone" not in rows(-3.3, scale=4.0)[name].note
        assert rows(0.0)[name].stored == 0


def test_what_is_no_number_is_refused():
    for x in (math.nan, math.inf):
        with pytest.raises(InvalidRequest, match="finite"):
            formats(x)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match="scale"):
            formats(1.0, scale=scale)


def test_rows_are_json():
    assert '"shown": "inf"' in to_json(formats(1e300))


@pytest.mark.parametrize(
    ("name", "scale", "ties"),
    [
        ("int8", 127.0, {0.5: 0, 1.5: 2, 2.5: 2, -0.5: 0, -1.5: -2}),
        ("int4", 7.0, {0.5: 0, 1.5: 2, 2.5: 2, 6.5: 6}),
        ("fp4", 6.0, {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, -5.0: -4}),
    ],
)
def test_ties_of_block_formats_go_to_the_even_code(name, scale, ties):
    assert {x: rows(x, scale=scale)[name].stored for x in ties} == ties


@pytest.mark.parametrize(
    ("x", "stored", "bits"),
    [(3.14159265, 3, "00000011"), (-2.5, -2, "11111110"), (300.0, 127, "01111111"),
     (-300.0, -128, "10000000"), (1e-9, 0, "00000000")],
)  # fmt: skip
def test_int8_without_a_scale_holds_whole_numbers(x, stored, bits):
    row = next(r for r in formats(x) if r.name == "int8, no scale")
    assert (row.stored, row.encoding, row.absolute_error) == (stored, bits, abs(x - stored))
