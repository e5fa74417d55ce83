# SPDX-License-Identifier: GPL-2.0-only
"""What --check says of faults planted on two nodes; `python -m faults` plants all, and trains."""

import pytest

import faults
from testbed import only_root


@pytest.fixture(scope='module')
def answers(request, installed_pytorch):
    only_root('gives nodes a network, mounts and a host name of their own')
    asked = [item.callspec.params['name'] for item in request.session.items if item.path == request.path]
    return faults.run_all([faults.FAULTS[name] for name in asked], installed_pytorch, faults.Job.check)


@pytest.mark.real
@pytest.mark.parametrize('name', faults.IN_EVERY_RUN)
def test_check_says_what_it_must(answers, name):
    if isinstance(answers[name], BaseException):
        raise answers[name]
    answer = answers[name]
    right, _ = faults.verdict(faults.FAULTS[name], answer.colour, answer.lines)
    assert right, answer
    assert answer.colour != 'hangs'
    assert not answer.left
