"""A drafter's folder is a pipeline's assistant in every published format of every method, without network."""

import dflash_formats
import diffusion_formats
import dspark_formats
import eagle3_formats
import mtp_formats
import peagle_formats
import pytest
import transformers
from tiny import tiny_target, tiny_tokenizer

from hf_specdec import AutoDrafter

TEXTS = ["w10 w11 w12 w13 w10 w11", "w30", "w50 w51 w52"]
OPTIONS = {"do_sample": False, "max_new_tokens": 12, "return_full_text": False}
WRITERS = {
    "eagle3": (eagle3_formats, eagle3_formats.write_head, eagle3_formats.random_head),
    "peagle": (peagle_formats, peagle_formats.write_head, lambda: eagle3_formats.random_head(mask_token_id=7)),
    "dflash": (dflash_formats, dflash_formats.write_net, dflash_formats.random_net),
    "dspark": (dspark_formats, dspark_formats.write_drafter, dspark_formats.random_drafter),
    "diffusion": (diffusion_formats, diffusion_formats.write_random, lambda: 1),
}
CASES = [(method, format) for method, (module, *_) in WRITERS.items() for format in module.FORMATS]
CASES.append(("mtp", "standalone"))


@pytest.mark.parametrize(("method", "format"), CASES)
def test_a_drafters_folder_is_the_assistant(tmp_path, method, format):
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    if method == "mtp":
        folder = str(mtp_formats.write_standalone(tmp_path / "drafter", mtp_formats.llama()))
    else:
        _, write, random = WRITERS[method]
        folder = str(write(tmp_path / "drafter", random(), format))
    pipe = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=folder)
    plain = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert AutoDrafter.detect(folder).method == pipe.assistant_model.method
    assert pipe.assistant_model.method == ("eagle3" if method == "peagle" else method)
    assert pipe.assistant_tokenizer is None
    assert pipe(TEXTS, **OPTIONS, batch_size=3) == plain(TEXTS, **OPTIONS)
    assert pipe.assistant_model.last_stats.num_drafted > 0
