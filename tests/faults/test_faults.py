# SPDX-License-Identifier: GPL-2.0-only
"""What --check says of faults planted on two nodes: docs/faults.md has all, with what a training did."""

import json

import pytest

import faults
from faults import __main__ as program
from testbed import only_root

RECORD = json.loads(program.RECORD.read_text())['faults']
TESTED = [name for name in faults.FAULTS if name not in faults.ONLY_BY_THE_PROGRAM]


@pytest.fixture(scope='module')
def answers(request, installed_pytorch):
    only_root('gives nodes a network, mounts and a host name of their own')
    asked = [item.callspec.params['name'] for item in request.session.items if 'answers' in item.fixturenames]
    return faults.run_all([faults.FAULTS[name] for name in asked], installed_pytorch, faults.Job.check)


@pytest.mark.real
@pytest.mark.parametrize('name', TESTED)
def test_check_says_what_it_must(answers, name):
    if isinstance(answers[name], BaseException):
        raise answers[name]
    answer = answers[name]
    right, _ = faults.verdict(faults.FAULTS[name], answer.colour, answer.lines)
    assert right, answer
    assert answer.colour != 'hangs'
    assert not answer.left


def test_what_check_must_say_follows_from_what_a_training_did():
    assert list(RECORD) == list(faults.FAULTS), 'python -m faults, for those that are new'
    wanted = {'breaks': ('red',), 'slow': ('named', 'yellow'), 'harmless': ('nothing', 'yellow')}
    wrong = {name for name, entry in faults.FAULTS.items() if entry.colour not in wanted[RECORD[name]['training']]}
    assert wrong == set(faults.HARM_OF_ANOTHER_KIND)


def test_lists_name_faults_that_there_are():
    for names in (faults.ONLY_BY_THE_PROGRAM, faults.HARM_OF_ANOTHER_KIND):
        assert set(names) <= set(faults.FAULTS)


def test_the_page_is_made_from_the_record():
    assert program.PAGE.read_text() == program.page(RECORD)
