"""The resize plan against recorded ones, and what holds for every image."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.conftest import GOLDEN
from v41flash.images import plan

RECORDED = json.loads((GOLDEN / "unit" / "image_plan.json").read_text())


def plan_of(name, width, height):
    config = RECORDED["configs"][name]
    return plan(
        width,
        height,
        max_image_tokens=config["vision_max_n_token"],
        min_pixels=config["vision_min_pixels"],
        patch_size=config["vision_patch_size"],
        downsample_ratio=config["vision_downsample_ratio"],
        max_wh_ratio=config["vision_max_wh_ratio"],
    )


def test_equals_every_recorded_plan():
    assert len(RECORDED["cases"]) > 60
    for case in RECORDED["cases"]:
        ours = plan_of(case["cfg"], case["width"], case["height"])
        expected = {
            "tokens": (case["n_llm_h"], case["n_llm_w"]),
            "patches": (case["n_vit_h"], case["n_vit_w"]),
            "pixels": (case["pixel_h"], case["pixel_w"]),
            "span": case["n_tokens"],
        }
        assert ours._asdict() == expected, case


@hypothesis.given(
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    name=st.sampled_from(sorted(RECORDED["configs"])),
)
def test_a_span_fits_and_its_tokens_cover_the_patches(width, height, name):
    ours = plan_of(name, width, height)
    assert ours.span <= RECORDED["configs"][name]["vision_max_n_token"]
    for tokens, patches, pixels in zip(ours.tokens, ours.patches, ours.pixels, strict=True):
        assert tokens >= 1 and pixels == 14 * patches
        assert 3 * (tokens - 1) < patches <= 3 * tokens


@pytest.mark.parametrize("size", [(0, 5), (5, -1)])
def test_an_image_without_pixels_is_refused(size):
    with pytest.raises(ValueError, match="pixels: both must be at least 1"):
        plan(*size, max_image_tokens=64, min_pixels=1)


def test_a_span_too_short_for_a_token_is_refused():
    with pytest.raises(ValueError, match="max_image_tokens is 3: must be at least 4"):
        plan(5, 5, max_image_tokens=3, min_pixels=1)
