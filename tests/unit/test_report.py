# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch report: what a bug report needs is in it, and no secret is, in whatever form it stands in a log."""
import json
import os
import stat
import subprocess
import sys

import pytest

from slingtorch.commands import report
from testbed import ROOT

SECRET = 'qJ7vXw2LmZ9tRb4K'
KEY = '-----BEGIN OPENSSH PRIVATE KEY-----\n%s-----END OPENSSH PRIVATE KEY-----\n' % ((SECRET * 4 + '\n') * 3)
ENVIRON = {'HOME': '/lustre/home7/jdoe', 'USER': 'jdoe'}

# SECRET stands for it; all that is between the bars must stay
HIDDEN = {
    'export': '|export HF_TOKEN=|SECRET',
    'quoted': "|export WANDB_API_KEY=|'SECRET and SECRET'",
    'half quoted': '|HF_TOKEN=|ab"c SECRET',
    'declare': '|declare -x AWS_SESSION_X=|"SECRET\\" SECRET"',
    'aws': '|AWS_ANYTHING=|SECRET',
    'trace': "|+ HF_TOKEN=|SECRET",
    'json': '|{"step": 3, "hf_token": |"SECRET"|, "loss": 0.5}|',
    'json in json': r'|{\"password\": |\"SECRET SECRET\"|, \"a\": 1}|',
    'json on two lines': '"client_secret":\n    "SECRET"|\n}|',
    'dictionary': "|{'api_key': |'SECRET'|, 'lr': 0.1}|",
    'yaml': 'db_password: correct SECRET battery|\nnext: 1|',
    'ini': 'passphrase = a SECRET',
    'number': 'password=12345678SECRET',
    'lua': '|setenv("HF_TOKEN", |"SECRET"|)|',
    'tcl': '|setenv HF_TOKEN| SECRET',
    'csh': "|setenv MY_KEY |'SECRET'",
    'tcl braces': '|setenv HF_TOKEN| {SECRET}',
    'table': '|HF_TOKEN|     SECRET',
    'option': '|train.py --hub-token| SECRET| --lr 3|',
    'option with =': '|train.py --hub-token=|SECRET',
    'curl': '|curl -u |jane:SECRET| https://example.org|',
    'header': '|Authorization:| Basic SECRET',
    'bearer': '|sent Bearer| SECRET',
    'cookie': '|Set-Cookie:| a=b; session=SECRET',
    'url': '|https://|jane:SECRET|@example.org/x|',
    'url without a name': '|git clone https://|SECRET|@example.org/x.git|',
    'url with @ in the password': '|http://|jane:a@SECRET|@example.org/x|',
    'url with / in the password': '|http://|jane:a/SECRET|@example.org/x|',
    'proxy without a scheme': '|http_proxy=|jane:SECRET|@proxy:3128|',
    'query': '|GET https://example.org/file?token=|SECRET&x=1',
    'signed': '|https://example.org/f?sv=2&sig=|SECRET',
    'netrc': '|machine example.org login jane password| SECRET',
    'docker': '|{"auths": |{"example.org": {"auth": "SECRET"}}}',
    'hugging face': '|cannot log in with |hf_SECRETSECRET|, stop|',
    'github': 'ghp_SECRETSECRET',
    'gitlab': 'glpat-SECRETSECRET',
    'amazon': 'AKIAABCDEFGHSECRET'.replace('SECRET', 'IJKLMNOP') + ' token=SECRET',
    'jwt': 'eyJSECRET.eyJSECRET.SECRET',
    'colours within': '|HF_TOKEN|=\x1b[1mSEC\x1b[0mRET'.replace('SEC\x1b[0mRET', SECRET[:5] + '\x1b[0m' + SECRET[5:]),
    'carriage return': '|10%|\rHF_TOKEN=SECRET',
    'control characters within': 'HF_TO\x00KEN=SECRET',
    'ssh key': KEY + '|after|',
    'ssh key with labels': '0: ' + KEY.replace('\n', '\n0: '),
    'ssh key in json': json.dumps({'k': KEY}) + '|\nafter|',
    'ssh key without an end': '|before\n|' + KEY.partition('-----END')[0],
    'ssh key without a beginning': KEY.partition('\n')[2] + '|after|',
    'public key': 'ssh-ed25519 AAAASECRET jdoe@login1',
}


def hidden(text, redact=report.Redactor(ENVIRON)):
    """The text without secrets."""
    text = redact(text)
    for piece in (SECRET, SECRET[:8], SECRET[8:], 'battery'):
        assert piece not in text, text
    return text


@pytest.mark.parametrize('case', HIDDEN)
def test_secret_goes_and_the_rest_stays(case):
    pieces = HIDDEN[case].replace('SECRET', SECRET).split('|')
    text = hidden(''.join(pieces))
    for kept in pieces[1::2]:
        assert kept.replace('\r', '\n') in text


@pytest.mark.parametrize('form', ['wandb.login(key="%s")', 'wandb login %s', 'wandb.login(key=\'%s\', relogin=True)'])
def test_older_key_of_weights_and_biases(form):
    key = '5ec0' + 36 * '7'
    assert report.Redactor(ENVIRON)(form % key) == form % report.REMOVED


@pytest.mark.parametrize('text', [
    'tokens/s: 10240, total tokens = 3.5e9, max_token=4096, num_tokens: 12',
    'TOKENIZERS_PARALLELISM=false',
    '--max-tokens 4096 --tokenizer meta-llama/Llama-3',
    "Namespace(token=None, lr=0.1)",
    'store_based_barrier_key:1',
    'MPICH ERROR [Rank 0] [job id 410301.1] [nid005414] - Abort(-1): GPU_SUPPORT_ENABLED is requested',
    'docker://example.org:5000/pytorch/pytorch:2.4@sha256:0123456789abcdef',
    '[rank0]: torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0',
    'tcp://nid001234:29500, http://proxy.example.org:3128/',
    'commit 3c7b64d309cc3c87fe93edeacc9201025a2a1510',
])
def test_what_is_no_secret_stays(text):
    assert report.Redactor(ENVIRON)(text) == text


def test_records_of_real_jobs_stay_readable():
    """Of what people published of 15 machines, nothing is taken that looks like a secret."""
    texts = [path.read_text(errors='replace') for kind in ('job', 'nccl', 'pals', 'environment')
             for path in (ROOT / 'tests/records' / kind).glob('*.txt')]
    assert len(texts) > 25 and report.REMOVED not in report.Redactor(ENVIRON)('\n'.join(texts))


def test_value_of_a_secret_variable_goes_wherever_it_stands():
    value = 'pa ss/%s"x' % SECRET
    redact = report.Redactor(dict(ENVIRON, MY_TOKEN=value, X_KEY=SECRET))
    for form in (value, 'pa%20ss%2F{}%22x'.format(SECRET), 'pa%20ss/{}%22x'.format(SECRET), json.dumps(value)):
        assert 'pa' not in hidden('it was %s here' % form, redact)


def test_numbers_and_files_are_no_secret_values():
    redact = report.Redactor(dict(ENVIRON, N_TOKENS='100000', SSH_AUTH_SOCK='/dev/null', PAGER_TOKEN='less'))
    assert redact('100000 in /dev/null, no less') == '100000 in /dev/null, no less'


def test_person():
    redact = report.Redactor(ENVIRON, ['jdoe', 'Jane Doe', 'root'], ['/lustre/home7/jdoe', '/'])
    text = redact('/lustre/home7/jdoe/run /lustre/home7/jdoe2 /lustre/scratch/jdoe/x JDOE jdoes (Jane Doe) root /opt\n'
                  '/home/colleague/x --mail-user=jane.d@example.org\n')
    assert text == ('$HOME/run /lustre/home7/jdoe2 /lustre/scratch/<user>/x <user> jdoes (<user>) root /opt\n'
                    '/home/<user>/x --mail-user=<address>\n')


@pytest.mark.parametrize('text', ['a' * 300000, 'token' * 60000, '://' * 100000, 'a:b@' * 75000, '"' * 300000,
                                  '-----BEGIN' * 30000, 'A' * 64 + '\n', '--a-' * 75000, '/home/' * 50000,
                                  'token="' * 50000, '\x1b]' * 150000])
@pytest.mark.timeout(60)
def test_no_text_takes_for_ever(text):
    """A pattern that tries each start against each end would take hours."""
    report.Redactor(ENVIRON)(text * (4500 if len(text) < 100 else 1))


# ----------------------------------------------------------------------------------------------------------------------
# the command

@pytest.fixture
def job(tmp_path):
    """A job's directory with a secret in each file."""
    directory = tmp_path / 'job'
    directory.mkdir()
    (directory / 'slurm-1.out').write_text('begin\nHF_TOKEN=%s\nNCCL WARN all is lost\n' % SECRET)
    (directory / 'check.json').write_text(json.dumps({'format': 1, 'title': 'check', 'password': SECRET}))
    (directory / 'train.o17').write_bytes(b'\x00\x01binary ' + SECRET.encode())
    (directory / 'id_rsa').write_text(KEY)
    (directory / 'latest.log').symlink_to('id_rsa')
    os.mkfifo(str(directory / 'pipe.log'))
    module = tmp_path / 'PyTorch.lua'
    module.write_text('setenv("NCCL_NET_PLUGIN", "x")\nsetenv("MY_TOKEN", "%s")\n' % SECRET)
    return directory


def run_report(job, *args, **variables):
    """Run the command; the CompletedProcess."""
    module = job.parent / 'PyTorch.lua'
    env = dict(os.environ, HOME=str(job.parent / 'home'), SLINGTORCH_SITE='lumi', PYTHONPATH=str(ROOT),
               LOADEDMODULES='gcc/12:PyTorch/2.4', _LMFILES_='/none:%s' % module, NCCL_DEBUG='INFO', **variables)
    return subprocess.run([sys.executable, '-m', 'slingtorch', 'report', *map(str, args)], env=env, cwd=str(job.parent),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=60)


def test_report_of_a_directory(job):
    done = run_report(job, job, SINGULARITYENV_WANDB_API_KEY=SECRET, SLURM_X='a\nMY_TOKEN=' + SECRET, NOT_OURS='x1y2')
    assert done.returncode == 0, done.stderr
    path = job.parent / report.DEFAULT_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    hidden(text + done.stdout + done.stderr)
    for there in ('EasyBuild   5', 'Python', 'FI_CXI_DEFAULT_CQ_SIZE', 'NCCL_NET_PLUGIN', 'NCCL WARN all is lost',
                  '"format": 1', 'NCCL_DEBUG=INFO', 'SINGULARITYENV_WANDB_API_KEY=<removed>', 'lumi'):
        assert there in text, there
    assert 'x1y2' not in text and 'PRIVATE KEY' not in text and 'binary' not in text
    for said in ('Read it before you send it', 'slurm-1.out', 'train.o17: no text', 'look like a job'):
        assert said in done.stdout, said
    assert path.name not in run_report(job, job.parent, '--output', 'other.txt').stdout.split('other.txt')[0]


def test_nothing_is_overwritten(job):
    path = job.parent / 'mine.txt'
    path.write_text('mine')
    for target in (path, job.parent / 'link'):
        done = run_report(job, '--output', target)
        if target == path:
            assert done.returncode == 1 and '--output' in done.stderr and path.read_text() == 'mine'
            (job.parent / 'link').symlink_to('nowhere')
    assert done.returncode == 1 and not (job.parent / 'nowhere').exists()


def test_file_that_is_not_there(job):
    done = run_report(job, job / 'slurm-2.out')
    assert done.returncode == 1 and 'slurm-2.out' in done.stderr
    assert not (job.parent / report.DEFAULT_NAME).exists()


def test_log_of_a_node_that_crashed(job):
    """The end of such a file is often zeros."""
    (job / 'slurm-1.out').write_bytes(b'rank 3 died\n' + 5000 * b'\0' + b'and this\n')
    assert run_report(job, job / 'slurm-1.out').returncode == 0
    assert 'rank 3 died\nand this\n' in (job.parent / report.DEFAULT_NAME).read_text()


def test_pipe_and_key_that_are_named(job):
    """A pipe does not make it wait; a key's file holds nothing after it."""
    done = run_report(job, job / 'pipe.log', job / 'id_rsa')
    assert done.returncode == 0 and 'pipe.log: no text' in done.stdout
    assert '<private key>' in hidden((job.parent / report.DEFAULT_NAME).read_text())


def test_without_site_module_and_easybuild(job, tmp_path):
    """A site that is not known and an EasyBuild that is not there are part of the report."""
    broken = tmp_path / 'broken/easybuild'
    broken.mkdir(parents=True)
    (broken / '__init__.py').write_text('raise ImportError("no EasyBuild")')
    done = subprocess.run([sys.executable, '-m', 'slingtorch', 'report'], cwd=str(tmp_path), stdout=subprocess.PIPE,
                          env={'PATH': os.environ['PATH'], 'SLINGTORCH_SITE': 'atlantis', 'PYTHONPATH': '%s:%s' % (
                              broken.parent, ROOT)}, stderr=subprocess.STDOUT, universal_newlines=True)
    text = (tmp_path / report.DEFAULT_NAME).read_text()
    assert done.returncode == 0 and 'no EasyBuild' in text and 'atlantis' in text and 'module load' not in text
    assert 'No module of PyTorch' in text


def test_directory_that_is_gone(tmp_path):
    gone = tmp_path / 'gone'
    gone.mkdir()
    done = subprocess.run(['bash', '-c', 'rmdir "$PWD"; "$0" -m slingtorch report', sys.executable], cwd=str(gone),
                          env={'PATH': os.environ['PATH'], 'PYTHONPATH': str(ROOT)}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True)
    assert done.returncode == 1 and 'this directory does not exist any more: cd to one that does' in done.stdout


def test_long_file_is_cut_at_ends_of_lines(tmp_path):
    path = tmp_path / 'long.log'
    line = 'HF_TOKEN=%s\n' % SECRET
    path.write_text('first\n' + line * ((report.HEAD_BYTES + report.TAIL_BYTES) // len(line) + 99) + 'last\n')
    head, tail = report.read_parts(str(path))
    assert head.startswith('first\n') and tail.endswith('\nlast\n') and set(tail.split('\n')[:-2]) == {line.strip()}
    assert head.endswith(line.strip())
    path.write_text(KEY[:200] + 'x' * (report.HEAD_BYTES + report.TAIL_BYTES))
    assert [len(part) < 300 for part in report.read_parts(str(path))] == [True, True]
