#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
Draws docs/images/*.svg: two diagrams, and plots of the figures that stand on the pages, beside a model of staging.

    tools/pictures.py            after a change of a figure or of this program; a test compares
"""
import math
import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
# legible on both backgrounds; readers whose browser is dark get the dark one
STYLE = ('<style>.paper{fill:#fff}text{fill:#222}.grid{stroke:#ddd}.box{fill:#eef4fb;stroke:#3b8ed0}.arrow{stroke:#555}'
         '.head{fill:#555}.small{font-size:11px}'
         '@media(prefers-color-scheme:dark){.paper{fill:#1e2129}text{fill:#e2e4e9}.grid{stroke:#444}'
         '.box{fill:#263447}.arrow{stroke:#aaa}.head{fill:#aaa}}</style>')
COLOURS = ['#3b8ed0', '#3aa83a', '#e07b39', '#d6454b', '#8f8f8f', '#a678d8', '#c98f00', '#b0665a']
UNITS = {'KiB': 1 << 10, 'MiB': 1 << 20, 'GiB': 1 << 30}


def svg(width, height, title, parts):
    """The text of a picture."""
    return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                      f'height="{height}" font-family="sans-serif" font-size="13" role="img">',
                      f'<title>{escape(title)}</title>', STYLE,
                      '<rect class="paper" width="100%" height="100%"/>', *parts, '</svg>', ''])


def text(x, y, words, **attributes):
    """One line of text."""
    given = ''.join(f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{given}>{escape(words)}</text>'


def plot(title, labels, ticks, series):
    """
    A plot with logarithmic axes and its legend on the right.

    :param labels: of x and y
    :param ticks: two lists of (value, word); the first and last limit the axis
    :param series: {name: points}; with '*' at the end of the name dashed, and each point marked
    """
    left, top, width, height = 70, 40, 470, 310

    def place(x, y):
        (x0, x1), (y0, y1) = ((math.log(axis[0][0]), math.log(axis[-1][0])) for axis in ticks)
        return left + width * (math.log(x) - x0) / (x1 - x0), top + height * (y1 - math.log(y)) / (y1 - y0)

    parts = [text(left, 22, title, font_weight='bold')]
    for value, word in ticks[0]:
        x = place(value, ticks[1][0][0])[0]
        parts += [f'<path class="grid" d="M{x:.0f} {top}v{height}"/>',
                  text(x, top + height + 18, word, text_anchor='middle')]
    for value, word in ticks[1]:
        y = place(ticks[0][0][0], value)[1]
        parts += [f'<path class="grid" d="M{left} {y:.0f}h{width}"/>', text(left - 6, y + 4, word, text_anchor='end')]
    parts += [text(left + width / 2, top + height + 40, labels[0], text_anchor='middle'),
              text(0, 0, labels[1], text_anchor='middle',
                   transform=f'translate(18 {top + height / 2:.0f}) rotate(-90)')]
    for number, (name, points) in enumerate(series.items()):
        colour, placed, y = COLOURS[number], [place(*point) for point in points], top + 12 + 22 * number
        drawn = f'stroke="{colour}" stroke-width="2" fill="none"'
        drawn += ' stroke-dasharray="5 4"' if name[-1] == '*' else ''
        parts += [f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}" {drawn}/>',
                  *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed),
                  f'<path d="M{left + width + 14} {y - 4}h22" {drawn}/>', text(left + width + 42, y, name.rstrip('*'))]
    return svg(left + width + 260, top + height + 54, title, parts)


def box(x, y, width, title, *lines):
    """A box with a title and lines."""
    return [f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{30 + 16 * len(lines)}" rx="6"/>',
            text(x + width / 2, y + 20, title, text_anchor='middle', font_weight='bold'),
            *(text(x + width / 2, y + 38 + 16 * number, line, text_anchor='middle', class_='small')
              for number, line in enumerate(lines))]


def arrow(x, y, x2, y2):
    """An arrow from the first to the second point."""
    angle = math.degrees(math.atan2(y2 - y, x2 - x))
    return [f'<path class="arrow" d="M{x} {y}L{x2} {y2}" stroke-width="1.5"/>',
            f'<path class="head" d="M0 0L-9 -4.5V4.5Z" transform="translate({x2} {y2}) rotate({angle:.0f})"/>']


def architecture():
    """Install and job: what knows what."""
    parts = [text(10, 22, 'install: once', font_weight='bold'), text(102, 232, 'job: each time', font_weight='bold')]
    install = [('easyconfig', 'knows what:', 'versions, sources,', 'sha256, roles'),
               ('parse hook', 'knows where:', 'adds the values and', 'modules of the site'),
               ('easyblock', 'knows how:', 'fetches, builds,', 'checks'),
               ('installation', 'software tree,', 'runscripts,', 'module file')]
    job = [('module load', "sets the site's values:", 'NCCL, libfabric,', 'MPI, containers'),
           ('srun, mpiexec, ...', 'starts the ranks,', 'gives each its', 'number'),
           ('runscript', 'knows when: ranks,', 'rendezvous, GPUs,', 'caches'),
           ('python', 'train.py with', 'torch.distributed', '')]
    for y, row in ((36, install), (246, job)):
        for number, words in enumerate(row):
            parts += box(10 + 190 * number, y, 158, *words)
            parts += arrow(170 + 190 * number, y + 39, 198 + 190 * number, y + 39) if number < 3 else []
    parts += box(200, 138, 158, 'site file', 'values with sources') + arrow(279, 137, 279, 117)
    parts += ['<path class="arrow" d="M659 116V204H89" fill="none" stroke-width="1.5"/>', *arrow(89, 204, 89, 244)]
    return svg(750, 336, 'Install and job: which part knows what', parts)


def ranks():
    """How ranks find each other."""
    parts = []
    for x, node, numbers in ((10, 'node 1', (0, 1)), (390, 'node 2', (2, 3))):
        parts += [f'<rect class="grid" x="{x}" y="96" width="350" height="236" rx="8" fill="none"/>',
                  text(x + 12, 116, node, font_weight='bold')]
        for number in numbers:
            left = x + 12 + 170 * (number % 2)
            parts += box(left, 128, 156, 'runscript', f'RANK={number}, WORLD_SIZE=4',
                         f'LOCAL_RANK={number % 2}', 'MASTER_ADDR=node 1', 'MASTER_PORT: by job, step')
            parts += box(left, 248, 156, f'python, rank {number}', 'asks the store' if number else 'keeps the store')
            parts += arrow(left + 78, 222, left + 78, 246) + arrow(375, 56, left + 78, 126)
            if number:
                x, y = 80 + 12 * number, 350 + 12 * number
                parts += [f'<path class="arrow" d="M{left + 78} 294V{y}H{x}" fill="none" stroke-width="1.5"/>',
                          *arrow(x, y, x, 296)]
    parts += box(190, 8, 370, 'srun, mpiexec, flux run, torchrun', "each rank's number, in variables of the launcher")
    parts += [text(130, 410 + 18 * number, line) for number, line in enumerate((
        'All ranks meet at the store, at MASTER_ADDR:MASTER_PORT.',
        'There they exchange the addresses of NCCL or gloo. Then they talk directly over the network.'))]
    return svg(750, 444, 'How ranks find each other', parts)


def bench():
    """Bus bandwidth by size, from the output on the page."""
    series, pages = {}, ''.join(page.read_text() for page in (ROOT / 'docs').glob('*.md'))
    row = r'^    gloo +(\w+) +(\d+) (KiB|MiB) +[\d.]+ ms +[\d.]+ +([\d.]+)'
    for name, size, unit, bus in re.findall(row, pages, re.M):
        series.setdefault(name, []).append((int(size) * UNITS[unit], float(bus)))
    return plot('bench: gloo, 4 ranks on two emulated nodes', ('size', 'bus bandwidth, GB/s'),
                ([(32 << 10, '32 KiB'), (256 << 10, '256 KiB'), (2 << 20, '2 MiB'), (16 << 20, '16 MiB')],
                 [(0.005, ''), (0.01, '0.01'), (0.1, '0.1'), (1, '1')]), series)


def slingmpi():
    """GB/s of all_reduce by size, from the table on the page."""
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in re.findall(
        r'^\| (?:bytes|\d+ [KM]iB) \|.*', (ROOT / 'docs/slingmpi.md').read_text(), re.M)]
    sizes = [int(row[0].split()[0]) * UNITS[row[0].split()[1]] for row in lines[1:]]
    series = {name: [(size, size / float(row[number]) / 1e3) for size, row in zip(sizes, lines[1:])]
              for number, name in enumerate(lines[0]) if number and name != 'MPI_Iallreduce'}
    return plot('all_reduce on 2 ranks of one machine', ('size', 'GB/s'),
                ([(size, row[0]) for size, row in zip(sizes, lines[1:])],
                 [(0.005, ''), (0.01, '0.01'), (0.1, '0.1'), (1, '1'), (10, '10')]), series)


# bytes/s and seconds; what the curves are drawn with
MODEL = {'bandwidth': 1.0e9, 'fanout': 8, 'block': 8e6, 'latency': 1e-3, 'sha256': 0.5e9, 'mount': 0.1}
# seconds by nodes; whose they are: docs/verification.md
PUBLISHED = {
    'ezpz, tarball of 8 GB': {8: 70, 256: 133, 1024: 255, 4096: 751},
    'Aurora, imports from Lustre': {64: 78, 2048: 120},
    'Aurora, imports through Copper': {64: 24, 2048: 57},
    'OLCF, staged': {8: 44},
    'OLCF, from NFS': {8: 236},
}


def model(nodes, size, bandwidth=MODEL['bandwidth'], fanout=MODEL['fanout']):
    """Seconds to bring a file of `size` bytes to the storage of so many nodes and to check it there.

    sbcast sends blocks of 8 MB through a tree (sbcast(1), --size and --fanout), each node to `fanout` others over its
    one link or storage (bytes/s). Assumed: the next block starts when all nodes have this one; all mount at once.
    """
    levels = max(1, math.ceil(math.log(nodes * (fanout - 1) + 1, fanout)) - 1) if nodes > 1 else 1
    per_block = levels * (min(fanout, nodes) * MODEL['block'] / bandwidth + MODEL['latency'])
    return math.ceil(size / MODEL['block']) * per_block + size / MODEL['sha256'] + MODEL['mount']


def staging():
    """The model of staging, and published figures."""
    nodes = [1 << power for power in range(1, 13)]
    series = {f'model, {size} GB at {speed} GB/s': [(n, model(n, size * 1e9, speed * 1e9)) for n in nodes]
              for size, speed in ((8, 1), (0.3, 1), (0.3, 0.2))}
    series.update({f'{name}*': sorted(points.items()) for name, points in PUBLISHED.items()})
    return plot('Time until the environment is on all nodes', ('nodes', 'seconds'),
                ([(n, str(n)) for n in (2, 8, 64, 256, 1024, 4096)], [(n, str(n)) for n in (1, 10, 100, 1000)]), series)


def pictures():
    """{file name: text} of all pictures."""
    return {f'{draw.__name__}.svg': draw() for draw in (architecture, ranks, bench, slingmpi, staging)}


if __name__ == '__main__':
    for picture, drawn_text in pictures().items():
        (ROOT / 'docs/images' / picture).write_text(drawn_text)
