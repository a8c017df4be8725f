"""The codec configurations of the study, as a table of texts. Knows no arithmetic.

    config = fw ["~" fill] ["%" reuse] "/" bw ["~" drain] ["/" dp] ["@" key ["@" first]] ["#" bits]
             [":" epochs]

`fw` and `bw` are codec specs, or `pubqB`, `pubaqB` of `published.py`. `key` is the codec of a
sample's first frame, for codecs that send deltas. `fill` is that of a batch's first sample,
later, `drain` that of its last one's gradient. With `reuse`, as `t0.2` or `s0.2` of `reuse.py`,
tokens or samples that hardly moved are not sent forward. `first` is that of a sample's first
gradient; if it is not given, gradients are sent by `bw` from the start. With `dp`, as in `--dp`,
two replicas of all stages train. Buffers have 16 `bits` a value by default. `none`
alone is `none/none`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_KEY = "fp16"
DEFAULT_EPOCHS = 6
DEFAULT_BITS = 16
_PATTERN = re.compile(
    r"(?P<fw>[^/@#:~%]+)(~(?P<fill>[^/@#:%]+))?(%(?P<reuse>[^/@#:]+))?"
    r"/(?P<bw>[^/@#:~]+)(~(?P<drain>[^/@#:]+))?(/(?P<dp>[^/@#:]+))?"
    r"(@(?P<key>[^/@#:]+))?(@(?P<first>[^/@#:]+))?(#(?P<bits>\d+))?(:(?P<epochs>\d+))?"
)

_QUALITY = "quality"
"""As in `quality0.01/q1.5+z`: steps of activations follow what compression is found to cost."""

GROUPS: dict[str, str] = {
    "none": "none",
    "main": """
        none
        aq3+z/q3+z@q4+z  aq2+z/q2+z@q4+z  aq1.8+z/q2+z@q3+z
        aq2+z/q1.5+z@q3+z  aq1.5+z/q1.5+z@q3+z
        aq2/q4   aq3/q6   aq4/q8    aq2+z/q4+z  aq3+z/q6+z  aq4+z/q8+z  aq3+z/q4t
        q2/q4    q3/q6    q4/q8     q2+z/q4+z   q3+z/q6+z   q4+z/q8+z
        pubaq2/pubq4  pubaq3/pubq6  pubaq4/pubq8
        pubq2/pubq4   pubq3/pubq6   pubq4/pubq8
        hq3/hq3
        top50/top50  top30/top30  top10/top10  aqtop30/top30  aqtop10/top10
    """,
    # As published: the whole first epoch in float32, gradients too.
    "published": "none  pubaq2/pubq4@none@none  pubaq3/pubq6@none@none  pubaq4/pubq8@none@none",
    "ef": """
        none
        none/top10  none/top10+ef  none/top10+ef21  none/top10+efmix
        none/q2t    none/q2t+ef    none/q2t+ef21
        top10/none  top10/top10+ef
    """,
    # Who shares a step, and does dither help: gradients, then activations.
    "axes": """
        none
        none/q2c+z  none/q2t+z  none/q2f+z
        none/q2c+d+z  none/q2t+d+z  none/q2f+d+z  none/q2tc+d+z
        none/q1t+z  none/q1f+z  none/q1t+d+z  none/q1f+d+z  none/q1.5t+d+z
        none/q2c  none/q2t  none/q2tc  none/q2t+d  none/q4t  none/q4t+d
        aq2c+z/none  aq2f+z/none  aq2t+z/none  aq2f+d+z/none
        aq1c+z/none  aq1f+z/none  aq1t+z/none  aq1f+d+z/none
        aq2c/none  aq2t/none  aq2tc/none
        q2c+z/none  q2t+z/none  q2f+z/none  q2c/none  q2tc/none
        aqc0.5/none  aqc1/none  aqc0.5f/none  aqc1f/none
    """,
    "key": """
        none
        aq2+z/q2+z@none  aq2+z/q2+z@fp16  aq2+z/q2+z@q8  aq2+z/q2+z@hq4  aq2+z/q2+z@q4
        aq2+z/q2+z@q4+z  aq2+z/q2+z@q3+z  aq2+z/q2+z@q2+z
        aq2+z/q2+z@qc0.25  aq2+z/q2+z@qc0.5
    """,
    # The smallest pair of rates within 1 % of none.
    "rates": """
        none
        aq3+z/q2+z@q3+z    aq2+z/q2+z@q3+z    aq1.5+z/q2+z@q3+z    aq1+z/q2+z@q3+z
        aq2+z/q1.5+z@q3+z  aq1.5+z/q1.5+z@q3+z  aq1+z/q1.5+z@q3+z
        aq2+z/q1.25+z@q3+z aq2+z/q1+z@q3+z  aq1.5+z/q1+z@q3+z  aq1+z/q1+z@q3+z
        aq1.5+z/q1.5+z@q2.5+z  aq1.5+z/q1.25+z@q2.5+z  aq1.25+z/q1.5+z@q2.5+z
        aqc0.5/q1.5+z@q3+z  aqc1/q1.5+z@q3+z
    """,
    "epochs": """
        none:1   aq4/q8@fp16:1   aq2+z/q2+z@q4+z:1   q2+z/q2+z:1
        none:2   aq4/q8@fp16:2   aq2+z/q2+z@q4+z:2   q2+z/q2+z:2
        none:3   aq4/q8@fp16:3   aq2+z/q2+z@q4+z:3   q2+z/q2+z:3
        none:10  aq4/q8@fp16:10  aq2+z/q2+z@q4+z:10  q2+z/q2+z:10
    """,
    # Two replicas that sum gradients.
    "dp": """
        none
        none/none/q4  none/none/q4+z  aq3/q6/q4  none/none/q8  none/none/none  aq3/q6
    """,
    # Gradients in one bit.
    "gradients": """
        none  none/q1t+d+z  none/q1.5t+d+z  none/q1t+d+z+last@q1t+d+z
    """,
    # The same over one epoch, with a codebook that the sender learns: `--epochs 1`.
    "codebook": """
        none  none/q1+z  none/q1+z+book  none/q1.25+z  none/q1.25+z+book  none/q1.5+z
        none/q1.5+z+book  none/q2+z  none/q0.85+z+book  qk0.35/q1+z+book  qk0.3/q1.25+z+book
    """,
    # Along directions that the sender learns, at constant quality.
    "directions": """
        none
        aqk0.5/none@qk0.5  aqk0.7/none@qk0.5  aqk1/none@qk0.7
        aqk0.6/q1+z+last@qk0.45@q1t+d+z
    """,
    # What a value of a buffer takes.
    "buffers": """
        none
        aq4/q8           aq4/q8#8           aq4/q8#4
        aq3+z/q3+z@q4+z                     aq3+z/q3+z@q4+z#4
        aq2+z/q2+z@q4+z  aq2+z/q2+z@q4+z#8  aq2+z/q2+z@q4+z#4
        aq2/q4                              aq2/q4#4
    """,
    # Fewer bits for the sample of each batch that all stages wait for.
    "fill": """
        none
        aq4/q8  aq4~aq2/q8  aq4~aq1/q8
        aq2+z/q1.5+z@q3+z  aq2+z~aq1+z/q1.5+z@q3+z
        aq1.7+z~aq1+z/q1.7+z@q4+z  aq1.5+z~aq1+z/q1.5+z@q4+z
    """,
    # What adapters change of activations, by `--task lora --set lora_r=16`, and by `--task lm`.
    "adapters": """
        none  aq4/q8  aq2+z/q2+z@q4+z  aq1+z/q1.5+z@q4+z  q2+z/q2+z
    """,
    # Sentences to classify; `--group cola` sets the task.
    "cola": """
        none
        pubq2/pubq4  pubaq2/pubq4
        q2/q4        aq2/q4
        q4+z/q4+z    aq2+z/q4+z
        top10/top10  aqtop30/top30
    """,
}


@dataclass(frozen=True, slots=True)
class Config:
    """One way to send tensors over every boundary of a run, and between replicas if there are."""

    fw: str
    bw: str
    key: str = DEFAULT_KEY
    first: str = ""
    epochs: int = DEFAULT_EPOCHS
    dp: str = ""
    bits: int = DEFAULT_BITS
    fill: str = ""
    drain: str = ""
    reuse: str = ""

    @property
    def quality(self) -> float:
        """The share of perplexity that compression may cost, if the config limits it."""
        return float(self.fw.removeprefix(_QUALITY)) if self.fw.startswith(_QUALITY) else 0.0

    @property
    def has_key(self) -> bool:
        """Whether a first forward frame or first gradient differs from later ones."""
        return self.fw.startswith(("aq", "pubaq")) or "+ef21" in self.bw or "+last" in self.bw

    def __str__(self) -> str:
        if self.fw == self.bw == "none" and not self.first and not self.dp:
            return "none"
        text = self.fw + f"~{self.fill}" * bool(self.fill) + f"%{self.reuse}" * bool(self.reuse)
        text += f"/{self.bw}" + f"~{self.drain}" * bool(self.drain) + f"/{self.dp}" * bool(self.dp)
        text += f"@{self.key}" * (self.has_key or bool(self.first))
        text += f"@{self.first}" * bool(self.first)
        return text + f"#{self.bits}" * (self.bits != DEFAULT_BITS)


def parse_config(text: str, default_epochs: int = DEFAULT_EPOCHS) -> Config:
    """Parse a config such as `aq2+z/q2+z@q4+z:10`.

    Raises:
        ValueError: the text is no config.
    """
    match = _PATTERN.fullmatch("none/none" + text[4:] if text.split(":")[0] == "none" else text)
    if match is None:
        raise ValueError(
            f"config '{text}': expected "
            "fw[~fill][%reuse]/bw[~drain][/dp][@key[@first]][#bits][:epochs]"
        )
    return Config(
        match["fw"],
        match["bw"],
        match["key"] or DEFAULT_KEY,
        match["first"] or "",
        int(match["epochs"] or default_epochs),
        match["dp"] or "",
        int(match["bits"] or DEFAULT_BITS),
        match["fill"] or "",
        match["drain"] or "",
        match["reuse"] or "",
    )


def configs_of(texts: str, default_epochs: int) -> list[Config]:
    """Parse the configs of a group's table or of the `--configs` option, without repeats."""
    parts = texts.replace(",", " ").split()
    return list(dict.fromkeys(parse_config(part, default_epochs) for part in parts))
