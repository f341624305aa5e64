"""A timeline of a tape made by hand, and the colours of what a browser painted of it."""

import base64
from functools import cache

from memfit.allocator.tape import Event
from memfit.certify.evidence.recording import Recording
from memfit.records.ledger import Kind, Phase
from memfit.records.results import Tensor
from memfit.report.curve import draw_curve

SPIKE, BEFORE, AFTER = 4 * 2**30, 30_000, 61_234  # bytes, and events on each side of it
COLOURS = """async ([png, x]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.width, image.height];
  const drawing = canvas.getContext('2d');
  drawing.drawImage(image, 0, 0);
  const from = Math.max(0, Math.round(x * image.width) - 3);
  const { data } = drawing.getImageData(from, 0, 7, image.height);
  return Array.from({ length: image.height }, (_, row) => Array.from({ length: 7 }, (_, column) =>
    Array.from(data.slice(4 * (7 * row + column), 4 * (7 * row + column) + 3))));
}"""


@cache
def draw_spike():
    """The curve of a tape of 91,236 events, one of which is far above all others."""
    flat = 2**30
    tensors = {
        0: Tensor(nbytes=flat, kind=Kind.PARAMETERS, module="", op="empty"),
        1: Tensor(nbytes=2**20, kind=Kind.ACTIVATIONS, module="", op="mm"),
        2: Tensor(nbytes=SPIKE - flat, kind=Kind.LOGITS, module="", op="mm"),
    }
    busy = [Event(1, 2**20 * (1 - n % 2)) for n in range(BEFORE + AFTER)]
    events = (
        Event(0, flat), *busy[:BEFORE], Event(2, SPIKE - flat), Event(2, 0), *busy[BEFORE:],
    )  # fmt: skip
    return draw_curve(Recording(
        events=events, marks=(20_000,), stretches=(Phase.FORWARD, Phase.BACKWARD), tensors=tensors,
        settings=None,
    ))  # fmt: skip


def height_of(page, box, colour, x):
    """The highest row that has a colour, as a share of a drawing's height; 0 where none has.

    Looked for within three pixels of `x`, a share of the width. box: the drawing's selector.
    """
    png = base64.b64encode(page.locator(box).screenshot()).decode()
    blank = page.context.browser.new_context().new_page()
    rows = blank.evaluate(COLOURS, [png, x])
    blank.context.close()
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    for number, row in enumerate(rows):
        if any(sum(abs(a - b) for a, b in zip(p, wanted, strict=True)) < 60 for p in row):
            return 1 - number / len(rows)
    return 0.0
