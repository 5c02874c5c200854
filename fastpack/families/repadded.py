"""Families of the last tier: the stock model on rows of equal length. It is exact, and no faster.

What mixes tokens in them depends on the row's length (LSH and block-sparse attention, permutations), attends in both
directions, or happens where no module can be wrapped. And families inside a
composite that was made for images or audio, of which only text is taken.
"""

from fastpack.families.spec import Family

REPADDED_FAMILIES: tuple[Family, ...] = (
    Family("big_bird", "BigBirdModel", repadded=True),
    Family("blt", "BltModel", repadded=True, of_rows=("patch_lengths",)),
    Family("cpmant", "CpmAntModel", repadded=True, unshifted="CpmAntForCausalLM"),
    Family("fuyu", "FuyuModel", repadded=True),
    Family("git", "GitModel", repadded=True),
    Family("got_ocr2", "GotOcr2Model", repadded=True),
    Family("inkling2_loop_text", "Inkling2LoopTextModel", package="inkling2_loop", repadded=True),
    Family("inkling2_text", "Inkling2TextModel", package="inkling2", repadded=True),
    Family("inkling_text", "InklingTextModel", package="inkling", repadded=True),
    Family("mllama", "MllamaTextModel", repadded=True),
    Family("moss_transcribe_diarize", "MossTranscribeDiarizeModel", repadded=True),
    Family("qwen4_exp_text", "Qwen4ExpTextModel", package="qwen4_exp", repadded=True),
    Family("xlm", "XLMModel", repadded=True, unshifted="XLMWithLMHeadModel", of_rows=("lengths",)),
    Family(
        "xlnet",
        "XLNetModel",
        repadded=True,
        unshifted="XLNetLMHeadModel",
        of_rows=("perm_mask", "input_mask"),
        switched_off=("use_mems",),
    ),
    Family("zaya", "ZayaModel", repadded=True),
)
