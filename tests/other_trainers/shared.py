"""What programs beside TRL's trainers share, of whichever version they run."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import VOCAB

LONGEST, END, PAD = 6, 1, 0  # tokens of an answer at most; the token that ends it; no token


def make_tokenizer():
    words = {str(i): i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=str(PAD), eos_token=str(END), bos_token="2"
    )


def largest(first, second):
    """The largest difference over the largest value."""
    assert first.keys() == second.keys()
    most = max(float(g.abs().max()) for g in second.values())
    return max(float((first[n] - second[n]).abs().max()) for n in first) / most
