# SPDX-License-Identifier: GPL-2.0-only
"""Writes the part of a module file that is about a container image, by EasyBuild's generator, in Lua or in Tcl.

When it is loaded, the module checks which files exist. In all other modes (above all unloading) it lists everything
that loading may have set, so that nothing stays behind even if files were removed. It needs no code of the site.
"""
import os
import re
from typing import Any, Dict, List

from easybuild.tools.module_generator import ModuleGeneratorLua

# Code that EasyBuild's generator cannot write, in Lua and in Tcl. Only one container module can be loaded, since SIF
# and /user-software stand for one image. Lmod replaces a loaded one, Environment Modules refuses (by itself since 5.1).
WORDS = {
    'start': ('family("container_image")\n', """if {[llength [info commands family]]} {
    family container_image
} elseif {[module-info mode load] && [info exists ::env(CONTAINERROOT)] && $::env(CONTAINERROOT) ne $root} {
    error "another container module is loaded ($::env(CONTAINERROOT)): unload it first"
}
"""),
    'loading': ('mode() == "load"', 'module-info mode load'),
    'not loading': ('mode() ~= "load"', 'expr {![module-info mode load]}'),
    'exists': ('lfs.attributes(%s, "mode")', 'file exists %s'),
    'does not exist': ('not lfs.attributes(%s, "mode")', 'expr {![file exists %s]}'),
    'readable': ('io.open(%s)', 'file readable %s'),
    'empty': ('(isFile(%s) and lfs.attributes(%s, "size") == 0)', 'expr {[file isfile %s] && [file size %s] == 0}'),
    'free': ('(mode() == "load" and not (os.getenv("SINGULARITYENV_%s") or os.getenv("APPTAINERENV_%s")))',
             'expr {[module-info mode load] && ![info exists ::env(SINGULARITYENV_%s)]'
             ' && ![info exists ::env(APPTAINERENV_%s)]}'),
    'ours': ('(mode() ~= "load" and (" " .. (os.getenv("SLINGTORCH_CONTAINER_ENVIRONMENT") or "") .. " "):find('
             '" %s ", 1, true))',
             'expr {![module-info mode load] && [info exists ::env(SLINGTORCH_CONTAINER_ENVIRONMENT)]'
             ' && "%s" in $::env(SLINGTORCH_CONTAINER_ENVIRONMENT)}'),
    'error': ('LmodError("%s")\n',
              'if {[llength [info commands reportError]]} { reportError "%s"; break }\nerror "%s"\n'),
}


def module_text(container: Dict[str, List[str]], root: str, sif_variable: str, name: str, generator: Any) -> str:
    """Module text for what Singularity.container() returned; sif_variable is set like SIF, name is the module's."""
    lua = isinstance(generator, ModuleGeneratorLua)
    image, dirs = container['image'][0], [root] + container['central']
    packages, squashfs = os.path.join(root, 'user-software'), os.path.join(root, 'user-software.squashfs')

    def word(key: str, value: str = '') -> str:
        """An entry of WORDS with this name or text."""
        form = WORDS[key][not lua]
        return form % ((value,) * form.count('%s'))

    def of_file(key: str, path: str) -> str:
        return word(key, '"%s"' % literal(path, lua))

    def when(conditions: Any, body: str, **more: Any) -> str:
        return generator.conditional_statement(conditions, body.strip('\n'), **more)

    def set_both(suffix: str, value: str) -> str:
        """Set a variable of both runtimes."""
        return ''.join(generator.set_environment(runtime + suffix, literal(value, lua).replace('$', '$$'))
                       for runtime in ('SINGULARITY', 'APPTAINER'))

    def prepend(variable: str, path: str, separator: str = ':') -> str:
        # the generator quotes paths only in Lua
        path = literal(path, lua) if lua else re.sub(r'([^\w/.:,=+-])', r'\\\1', path)
        return generator.prepend_paths(variable, [path], allow_abs=True, expand_relpaths=False, delim=separator)

    def prepend_both(suffix: str, path: str, separator: str = ':') -> str:
        return prepend('SINGULARITY' + suffix, path, separator) + prepend('APPTAINER' + suffix, path, separator)

    def use(path: str) -> str:
        return ''.join(generator.set_environment(variable, literal(path, lua).replace('$', '$$'))
                       for variable in ('SIF', sif_variable))

    def stop(message: str) -> str:
        return word('error', literal(message, lua))

    own, *central = [os.path.join(path, image) for path in dirs]
    text = word('start') + generator.comment('the image: its own copy, else the first readable central copy')
    choice = stop("The container image %s is missing or cannot be read. Searched: %s\nRemedy: run 'eb --rebuild %s' "
                  "to install it again" % (image, ', '.join(dirs), container['easyconfig'][0]))
    for path in reversed(central):
        said = "%s: its own copy of the container image does not exist; using %s" % (name, path)
        choice = when(of_file('readable', path), use(path) + generator.msg_on_load(said + '\n' * lua),
                      else_body=choice.strip('\n'))
    text += when([word('not loading'), of_file('readable', own)], use(own), cond_or=True, else_body=choice.strip('\n'))
    text += when([word('loading'), of_file('empty', squashfs)], stop(
        "%s is empty, left behind by an interrupted command.\nRemedy: remove it; the packages then come from the "
        "directory %s" % (squashfs, packages)))
    text += generator.set_environment('CONTAINERROOT', root)

    text += generator.comment('bind mounts: host paths that exist now; packages from one file or a directory')
    binds = ([os.path.join(root, 'runscripts') + ':/runscripts:ro'] + container['bind']
             + [squashfs + ':/user-software:image-src=/user-software', packages + ':/user-software'])
    for bind in reversed(binds):
        body = prepend_both('_BINDPATH', bind, ',')
        if bind == binds[-1]:
            body = when([word('not loading'), of_file('does not exist', squashfs)], body, cond_or=True)
        text += when([word('not loading'), of_file('exists', bind.split(':')[0])], body, cond_or=True)
    for path in reversed(container['path']):
        text += prepend_both('ENV_PREPEND_PATH', path)

    for driver in container['gpu']:
        text += generator.comment('GPUs: the driver libraries, as with the option --%s' % driver.lower())
        text += set_both('_' + driver, '1')

    # not with pushenv, which would override the user, and which Lmod 8.6 forgets in Tcl
    text += generator.comment('variables inside the container, unless the user has set them')
    for variable in container['env']:
        key, value = variable.split('=', 1)
        text += when([word('free', key), word('ours', key)], set_both('ENV_' + key, value)
                     + prepend('SLINGTORCH_CONTAINER_ENVIRONMENT', key, ' '), cond_or=True)
    return text + '\n'


def literal(text: str, lua: bool) -> str:
    """Text for a quoted string of Lua or Tcl, safe whatever the generator does with quotes in it."""
    special = r'[\\"\n]|^[ .]+|[ .]+$| \.\. ' if lua else r'[\\"\n$\[\]{}]'
    form = '\\%03d' if lua else '\\%03o'
    return re.sub(special, lambda found: ''.join(form % ord(char) for char in found.group()), text)
