"""Batches made up to count a step have the shape of real ones, and learn of the same tokens."""

import numpy as np
import pytest
from tiny_runs import tiny_recipe

from memfit.records.recipe import Parallel, Preference
from memfit.records.shapes import BatchShape
from memfit.train.data.sampler import IGNORED
from memfit.train.measure.counters import synthetic_micro

VOCAB = 300
PAIRS = {"packing": False, "micro_batch": 4}


def made(shape=None, **changes):
    return synthetic_micro(tiny_recipe(**changes), VOCAB, shape)


def test_a_label_is_the_next_token_of_its_document_and_the_last_has_none():
    micro = made(BatchShape(rows=2, tokens=9, documents=((4, 5), (8, 1))))
    assert micro.input_ids.shape == (2, 9)
    assert 0 <= micro.input_ids.min() <= micro.input_ids.max() < VOCAB
    for row, lengths in enumerate(micro.documents):
        end = 0
        for n in lengths:
            ids, labels = (x[row, end : end + n] for x in (micro.input_ids, micro.labels))
            assert labels.tolist() == [*ids[1:], IGNORED]
            assert micro.position_ids[row, end : end + n].tolist() == list(range(n))
            end += n


def test_documents_of_one_token_learn_one_all_the_same():
    micro = made(BatchShape(rows=2, tokens=3, documents=((1, 1, 1), (1, 1, 1))))
    assert (micro.labels != IGNORED).sum() == 1
    assert micro.labels[0, 0] == micro.input_ids[0, 0]


def test_rows_of_one_document_say_no_places_unless_ranks_share_them():
    assert made(packing=False).position_ids is None
    shared = made(packing=False, parallel=Parallel(cp=2))
    assert shared.input_ids.shape == (2, 16)
    assert shared.position_ids.tolist() == [list(range(16))]


@pytest.mark.parametrize("reference", ["none", "precomputed"])
def test_pairs_have_a_number_of_the_reference_where_it_is_computed_before(reference):
    micro = made(objective="dpo", preference=Preference(beta=0.1, reference=reference), **PAIRS)
    if reference == "none":
        assert micro.reference is None
    else:
        assert micro.reference.tolist() == [0.0] * 4
        assert micro.reference.dtype == np.float32


def test_of_conversations_each_preferred_token_is_learned_once_and_all_prompts_are():
    """ORPO's cross-entropy is of whole conversations: what is no answer stands in the context."""
    micro = made(
        objective="orpo",
        preference=Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0),
        **PAIRS,
    )
    answers, context = micro.labels != IGNORED, micro.context != IGNORED
    assert not (answers & context).any()
    assert context[::2, :16].all()  # prompts of preferred rows: the first halves
    assert not context[1::2].any()
    assert answers[::2, 16:-1].all()
    learned = np.where(context, micro.context, micro.labels)
    assert (learned[::2, :-1] == micro.input_ids[::2, 1:]).all()


def test_rated_rows_are_desirable_in_turns():
    kto = Preference(beta=0.1, loss_type="kto", desirable=1.0, undesirable=1.0,
                     reference="precomputed")  # fmt: skip
    micro = made(objective="kto", preference=kto, **PAIRS)
    assert micro.rated.desirable.tolist() == [True, False, True, False]
    assert (micro.rated.input_ids == micro.input_ids).all()
    assert (micro.rated.labels == micro.labels).all()
    assert micro.rated.reference.tolist() == [0.0] * 4
    plain = made(objective="kto", preference=Preference(
        beta=0.1, loss_type="apo_zero_unpaired", desirable=1.0, undesirable=1.0,
        reference="precomputed",
    ), **PAIRS)  # fmt: skip
    assert plain.rated.input_ids is None
