"""Any value in any field of a model's configuration: a model, or one line that names a field."""

import dataclasses
import math

import pytest

from v41flash.config import ConfigError, ModelConfig
from v41flash.presets import tiny

ODD = [
    *(-(2**40), -3, 0, 1, 2**31, 2**63, 1 << 100, 10**400, True, False, None),
    *(1.5, math.nan, math.inf, -math.inf, 1e300, "", "a", "fp4", "bfloat16", "float64", b"x"),
    *([], [1], [5, -2, 0], [None], ["a"], [2**40], (2, 1), {}, {"a": 1}, {"": 0}, {1: 2}, object()),
]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelConfig)])
def test_any_value_of_a_field_is_a_model_or_one_line(field):
    for value in ODD:
        try:
            config = ModelConfig.from_dict(tiny().to_dict() | {field: value})
        except ConfigError as error:
            assert error.field.partition(".")[0] in tiny().to_dict()
            assert len(str(error).splitlines()) == 1
        else:
            assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("field", ["vision", "quantization_config"])
@pytest.mark.parametrize("value", [5, "fp4", [3], True])
def test_what_is_no_object_is_refused(field, value):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny().to_dict() | {field: value})
    assert str(caught.value) == f"{field} = {value!r}: must be an object: names and their values"


@pytest.mark.parametrize("field", ["vocab_size", "hc_sinkhorn_iters", "engram_vocab_size"])
@pytest.mark.parametrize("value", [2**31, 10**30])
def test_sizes_beyond_32_bits_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"^{field} = {value}: must be below 2..31"):
        tiny(**{field: value})
