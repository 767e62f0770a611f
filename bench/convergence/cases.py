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
    nodes: int = 2  # of the 8 ranks


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
MUON = "Muon"
# Twice as many steps, so that there are several outer ones; half as many sequences in each.
OUTER = {
    f"outer steps of {every}{', Muon' if muon else ''}": Setting(steps=600, batch=8, muon=muon, outer_every=every)
    for every, muon in ((10, False), (30, False), (30, True), (100, False), (100, True))
}
# Where nearly all of a sum crosses between nodes, and no rank adds another's unrounded values.
ALONE = {"8 nodes": Setting(nodes=8), "8 nodes, Muon": Setting(nodes=8, muon=True)}
LARGER = "3.3 M parameters"  # the GPT of examples/demo.py, at its learning rate
CASES = {
    "usual": Setting(),
    **OUTLIERS,
    **ALONE,
    LARGER: Setting(
        width=256,
        layers=4,
        sequence=128,
        batch=1,
        steps=2000,
        learning_rate=1e-3,
        beta2=0.95,
        validation_sequences=1024,
    ),
    "bfloat16 weights": Setting(gathered_as="bfloat16"),
    MUON: Setting(muon=True),
    **OUTER,
}

DEFAULT_WEIGHTS, DEFAULT_GRADIENTS = "int8:256", "int8:128/int4:128"  # those of zcomm.Options
EDEN = tuple(f"int8:128/eden{bits}:128" for bits in (4, 3, 2))
# Of rows that cost the same the plainest comes first: where both will do, the rule takes it.
CONFIGURATIONS = (
    Configuration(),
    Configuration(gradients="bf16"),  # the least that differs from exact: what a harmless change does
    # Fewer bits; words that cost no bytes.
    Configuration(gradients="int8:128"),
    Configuration(gradients=DEFAULT_GRADIENTS),
    Configuration(gradients=f"{DEFAULT_GRADIENTS}:stochastic"),
    Configuration(gradients=DEFAULT_GRADIENTS, feedback=True),
    Configuration(gradients="int4:128"),
    # Blocks.
    Configuration(gradients="int8:128/int4:64"),
    Configuration(gradients="int8:128/int4:2048"),
    Configuration(gradients="int4:2048"),
    # Rotated, with as many or fewer bits.
    *(Configuration(gradients=formats, feedback=feedback) for formats in EDEN for feedback in (False, True)),
    # Weights.
    Configuration(weights="int8:256"),
    Configuration(weights="int4:256"),
    Configuration(weights="int8:256", flat=True),
    # Both: with zcomm.fsdp.compress, and what init_process_group("zcomm") alone does.
    Configuration(DEFAULT_WEIGHTS, DEFAULT_GRADIENTS),
    Configuration(DEFAULT_WEIGHTS, DEFAULT_GRADIENTS, flat=True),
    # Where int4 rounds most of a gradient to zero.
    *(
        Configuration(gradients=formats, case=case)
        for case in OUTLIERS
        for formats in ("exact", "int4:128", DEFAULT_GRADIENTS, *EDEN)
    ),
    # Where a sum is quantized nearly whole, and where a model trains for longer.
    *(
        Configuration(gradients=formats, case=case)
        for case in (*ALONE, LARGER)
        for formats in ("exact", DEFAULT_GRADIENTS, *EDEN)
    ),
    *(Configuration(gradients=formats, case="8 nodes", feedback=True) for formats in EDEN),
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
    *(Configuration(gradients=formats, case=MUON) for formats in (DEFAULT_GRADIENTS, *EDEN)),
    # What two sites tell each other once in many steps.
    *(
        Configuration(gradients=format, case=case, feedback=feedback)
        for case in OUTER
        for format, feedback in (
            ("exact", False),
            *((f"{kind}:64", True) for kind in ("int8", "int4", "eden2")),
            *((f"{kind}:64", False) for kind in ("int4", "eden2")),
        )
    ),
)
