"""`memfit calibrate`, part by part: products, attention, memory and the host link, launches."""

from __future__ import annotations

from on_gpu.rows import Place, Row, Unit


def list_units(place: Place) -> list[Unit]:
    from memfit.train.measure.calibrate import PARTS

    return [Unit(name, 150.0) for name in PARTS]


def measure(name: str, place: Place) -> Row:
    """The curves of one part, as `memfit calibrate` measures them."""
    from memfit.records import to_data
    from memfit.train.measure import calibrate

    device = calibrate.find_torch_device(place.device)
    found = calibrate.measure(device, quick=place.rehearsal, parts=(name,))
    curves = [
        {**to_data(c), "points": [[float(f"{n:.6g}") for n in point] for point in c.points]}
        for c in found.curves
    ]
    row: Row = {"curves": curves}
    if found.calibration.launch_seconds is not None:
        row["launch_seconds"] = found.calibration.launch_seconds
    return row | {"context": found.calibration.context}
