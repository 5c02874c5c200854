"""Families of the last tier: the stock model on rows of equal length, which is exact and no faster.

Their modules mix tokens in a way that depends on the row's length (LSH and block-sparse attention, permutations),
attend in both directions, or mix tokens outside of any module that could be wrapped. Other families are parts of a
model for images or audio, and get text only. Blocks of experts that have a spec are fast.
"""

from fastpack.families.shared_specs import MIXTRAL_EXPERTS, named
from fastpack.families.spec import Family

REPADDED_FAMILIES: tuple[Family, ...] = (
    Family("big_bird", "BigBirdModel", repadded=True),
    Family("blt", "BltModel", repadded=True, row_arguments=("patch_lengths",)),
    Family("cpmant", "CpmAntModel", repadded=True, unshifted="CpmAntForCausalLM"),
    Family("git", "GitModel", repadded=True),
    Family("inkling2_loop_text", "Inkling2LoopTextModel", package="inkling2_loop", repadded=True),
    Family("inkling2_text", "Inkling2TextModel", package="inkling2", repadded=True),
    Family(
        "inkling_text",
        "InklingTextModel",
        package="inkling",
        repadded=True,
        fast=named("Inkling", Experts=MIXTRAL_EXPERTS),
    ),
    Family("mllama", "MllamaTextModel", repadded=True),
    Family("moss_transcribe_diarize", "MossTranscribeDiarizeModel", repadded=True),
    Family(
        "qwen4_exp_text",
        "Qwen4ExpTextModel",
        package="qwen4_exp",
        repadded=True,
        fast=named("Qwen4ExpText", Experts=MIXTRAL_EXPERTS),
    ),
    Family("xlm", "XLMModel", repadded=True, unshifted="XLMWithLMHeadModel", row_arguments=("lengths",)),
    Family(
        "xlnet",
        "XLNetModel",
        repadded=True,
        unshifted="XLNetLMHeadModel",
        row_arguments=("perm_mask", "input_mask"),
        disabled_caches=("use_mems",),
    ),
    Family("zaya", "ZayaModel", repadded=True, fast=named("Zaya", Experts=MIXTRAL_EXPERTS)),
)
