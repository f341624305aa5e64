"""Weights and pairs of rows that another program can make, too, from nothing but a formula."""

import torch


def fill_by_formula(model, size=0.3):
    """Sines of an index and of the letters' codes of a parameter's name; size: of matrices."""
    for name, parameter in model.named_parameters():
        short = name.replace("base_model.model.", "").replace(".base_layer.", ".")
        k = sum(map(ord, short.replace(".default.", ".")))
        values = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (1.0 + k % 7) + k)
        with torch.no_grad():
            values = values.reshape(parameter.shape)
            parameter.copy_(1 + 0.1 * values if parameter.dim() == 1 else size * values)


def make_formula_pairs(tokens=16):
    """Ids and aligned labels (4, tokens): two pairs of five tokens of a prompt and an answer."""
    of = range(tokens)
    ids = torch.tensor([[(7 * i * i + 13 * i + 31 * r) % 97 for i in of] for r in range(4)])
    ids[1::2, :5] = ids[::2, :5]
    labels = torch.full_like(ids, -100)
    labels[:, 4:-1] = ids[:, 5:]
    labels[1::2, tokens - 4 :] = -100  # rejected answers have three tokens less
    return ids, labels


def mismatch(ids, labels):
    """Each row's prompt with the answer of the row before, and its labels."""
    wrong, learned = torch.zeros_like(ids), torch.full_like(labels, -100)
    for row in range(len(ids)):
        count = int((labels[row - 1] != -100).sum())
        wrong[row, :5] = ids[row, :5]
        wrong[row, 5 : 5 + count] = ids[row - 1, 5 : 5 + count]
        learned[row, 4 : 4 + count] = ids[row - 1, 5 : 5 + count]
    return wrong, learned


def find_context(ids, labels):
    """Aligned labels of what the preferred of such rows say before their answers."""
    context = torch.full_like(labels, -100)
    context[::2, :4] = ids[::2, 1:5]
    return context


def mark_last(ids, labels):
    """Labels of each row's last token alone, which is the one after its last target."""
    last = (labels != -100).long().cumsum(1).argmax(1) + 1
    marked = torch.full_like(labels, -100)
    return marked.scatter(1, last[:, None], ids.gather(1, last[:, None]))
