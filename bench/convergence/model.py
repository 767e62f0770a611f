"""What every run of the study trains, and on what."""

import functools

import torch
from torch import Tensor
from train_gpt import GPT, load_corpus, sample

from bench.convergence.cases import OUTLIER_CHANNELS, Setting

VALIDATION_BATCH = 64

corpus = functools.cache(load_corpus)


def new_model(setting: Setting, seed: int) -> GPT:
    torch.manual_seed(seed)
    model = GPT(setting.width, setting.layers, setting.sequence)
    with torch.no_grad():
        for table in (model.bytes, model.positions):
            table.weight[:, :OUTLIER_CHANNELS] *= setting.outliers
    return model


def learning_rate(setting: Setting, step: int) -> float:
    """Up, then down to nothing."""
    return setting.learning_rate * min((step + 1) / setting.warmup_steps, 1.0) * (1 - step / setting.steps)


def validate(model: GPT, held_out: Tensor, setting: Setting) -> float:
    """The mean loss over the same held-out sequences in every run."""
    sequences = sample(held_out, setting.validation_sequences, setting.sequence, seed=0)
    with torch.no_grad():
        losses = [model(batch).item() * len(batch) for batch in sequences.split(VALIDATION_BATCH)]
    return sum(losses) / len(sequences)
