import pytest

from onward.errors import InvalidRequest
from onward.web.openai_api.template_fields import template_variables


def test_effort_and_template_variables_come_to_one_set() -> None:
    assert template_variables(None, None) == {}
    assert template_variables(None, "low") == {"reasoning_effort": "low"}
    assert template_variables(None, "none")["enable_thinking"] is False
    assert template_variables({"enable_thinking": True}, "none")["enable_thinking"] is True
    with pytest.raises(InvalidRequest) as fault:
        template_variables(None, "much")
    assert fault.value.param == "reasoning_effort"
