"""What bench/convergence/run.py trains: the settings and the configurations that are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What is trained. The runs that are compared share it. The learning rate is the one of those tried with the lowest
    loss of the exact run, as anyone would tune it; docs/numerics.md has the others."""

    width: int = 64
    layers: int = 2
    sequence: int = 64
    batch: int = 4  # sequences per rank and step
    steps: int = 300
    learning_rate: float = 5e-3
    warmup_steps: int = 100
    beta2: float = 0.99
    outliers: float = 1.0  # what the embeddings' first OUTLIER_CHANNELS channels are multiplied with at the start
    gathered_as: str = "float32"  # what weights are cast to before they are gathered; shards are float32
    validation_sequences: int = 2048
    muon: bool = False  # steps the matrices of the blocks, AdamW all else
    outer_every: int = 0  # inner steps of two sites to an outer step; 0: ranks of nodes step together


@dataclass(frozen=True)
class Configuration:
    """What the collectives of a run send. Fields that come later need a default, for the results that are there."""

    weights: str = "exact"
    gradients: str = "exact"  # inside a node / between nodes; of outer steps: pseudo-gradients and their means
    case: str = "usual"  # one of CASES
    flat: bool = False  # blocks run across parameters, and norms are not exempt
    feedback: bool = False  # gradients: zcomm.codec.ErrorFeedback(), what an encoding loses is added to the next one
    exchanges: str = "exact"  # Muon's all-to-alls of bfloat16
    lossless: bool = False  # exact weights of 16 bits: lossless differences to those gathered last cross nodes

    @property
    def words(self) -> str:
        """What is in none of the formats."""
        words = [word for word in ("flat", "feedback", "lossless") if getattr(self, word)]
        return " ".join(words + [f"exchanges={self.exchanges}"] * (self.exchanges != "exact"))

    def __str__(self) -> str:
        return " ".join(part for part in (f"{self.case}:", self.weights, self.gradients, self.words) if part)


# Large language models grow such channels by themselves (Dettmers et al., arXiv 2208.07339); ours are put there. The
# gradients of the matrices that read them have columns as much larger.
OUTLIER_CHANNELS = 2
OUTLIERS = {"outliers x20": Setting(outliers=20.0), "outliers x100": Setting(outliers=100.0)}
# As FSDP2 gathers with MixedPrecisionPolicy(param_dtype=torch.bfloat16).
MUON = "Muon"  # the only case whose matrices AdamW does not step
# Twice as many steps, so that there are several outer ones; half as many sequences in each.
OUTER = {
    f"outer steps of {every}{', Muon' if muon else ''}": Setting(steps=600, batch=8, muon=muon, outer_every=every)
    for every, muon in ((10, False), (30, False), (30, True), (100, False), (100, True))
}
CASES = {
    "usual": Setting(),
    **OUTLIERS,
    "bfloat16 weights": Setting(gathered_as="bfloat16"),
    MUON: Setting(muon=True),
    **OUTER,
}

DEFAULT_WEIGHTS, DEFAULT_GRADIENTS = "int8:256", "int8:128/int4:128"  # those of zcomm.Options
# Of rows that cost the same the plainest comes first: where both will do, the rule takes it.
CONFIGURATIONS = (
    Configuration(),
    Configuration(gradients="bf16"),  # the least that differs from exact: what a harmless change does
    # Fewer bits; words that cost no bytes.
    Configuration(gradients="int8:128"),
    Configuration(gradients=DEFAULT_GRADIENTS),
    Configuration(gradients=f"{DEFAULT_GRADIENTS}:stochastic"),
    Configuration(gradients=f"{DEFAULT_GRADIENTS}:hadamard"),
    Configuration(gradients=f"{DEFAULT_GRADIENTS}:hadamard:stochastic"),
    Configuration(gradients=DEFAULT_GRADIENTS, feedback=True),
    Configuration(gradients="int4:128"),
    # Blocks.
    Configuration(gradients="int8:128/int4:64"),
    Configuration(gradients="int8:128/int4:2048"),
    Configuration(gradients="int4:2048"),
    Configuration(gradients="int4:2048:hadamard"),
    # Fewer bits than anything else here.
    Configuration(gradients="int8:128/int2:128"),
    Configuration(gradients="int8:128/int2:128", feedback=True),
    # Weights.
    Configuration(weights="int8:256"),
    Configuration(weights="int6:256"),
    Configuration(weights="int4:256"),
    Configuration(weights="int4:256:hadamard"),
    Configuration(weights="int8:256", flat=True),
    # Both: with zcomm.fsdp.compress, and what init_process_group("zcomm") alone does.
    Configuration(DEFAULT_WEIGHTS, DEFAULT_GRADIENTS),
    Configuration(DEFAULT_WEIGHTS, DEFAULT_GRADIENTS, flat=True),
    # Where int4 rounds most of a gradient to zero, unless it is rotated.
    *(
        Configuration(gradients=formats, case=case)
        for case in OUTLIERS
        for formats in (
            "exact",
            "int4:128",
            "int4:128:hadamard",
            DEFAULT_GRADIENTS,
            f"{DEFAULT_GRADIENTS}:hadamard",
        )
    ),
    # Where lossless differences must change nothing.
    *(
        Configuration(gradients=formats, case="bfloat16 weights", lossless=lossless)
        for formats in ("exact", DEFAULT_GRADIENTS)
        for lossless in (False, True)
    ),
    # What remains exact once weights and gradients are compressed.
    *(
        Configuration(*formats, case=MUON, exchanges=exchanges)
        for formats in (("exact", "exact"), (DEFAULT_WEIGHTS, DEFAULT_GRADIENTS))
        for exchanges in ("exact", "int8:128", "int4:128")
    ),
    Configuration(DEFAULT_WEIGHTS, "int8:128", case=MUON, exchanges="int8:128"),
    # What two sites tell each other once in many steps.
    *(
        Configuration(gradients=format, case=case, feedback=feedback)
        for case, setting in OUTER.items()
        for format, feedback in (
            ("exact", False),
            *((f"{kind}:64", True) for kind in ("int8", "int4", "int2")),
            *((f"{kind}:64", False) for kind in ("int4", "int2") if not setting.muon),
        )
    ),
)
