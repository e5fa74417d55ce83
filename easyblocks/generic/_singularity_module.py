# SPDX-License-Identifier: GPL-2.0-only
"""Functions of the Singularity easyblock: the text for a module file of a container image, in Lua and in Tcl.

While loading it decides by what is there. In all other modes (unloading above all) it names everything that loading can
have set, so that nothing stays behind, whatever has been removed meanwhile. It needs no code of the site.
"""
import json
import os
import re

# One container module at a time: SIF and /user-software can mean one image only. Lmod replaces the one that is loaded,
# Environment Modules refuses (by itself from 5.1 on).
TCL_START = """if {[llength [info commands family]]} {
    family container_image
} elseif {[module-info mode load] && [info exists ::env(CONTAINERROOT)] && $::env(CONTAINERROOT) ne $root} {
    error "another container module is loaded ($::env(CONTAINERROOT)): unload it first"
}
set loading [module-info mode load]
"""
# statements and conditions, in Lua and in Tcl
WORDS = {
    'start': ('family("container_image")\nlocal loading = mode() == "load"\n', TCL_START),
    'comment': ('-- %(text)s\n', '# %(text)s\n'),
    'if': ('if %(condition)s then\n', 'if {%(condition)s} {\n'),
    'elseif': ('elseif %(condition)s then\n', '} elseif {%(condition)s} {\n'),
    'else': ('else\n', '} else {\n'), 'end': ('end\n', '}\n'),
    'not': ('not (%s)', '!(%s)'), 'and': (' and ', ' && '), 'or': (' or ', ' || '),
    'loading': ('loading', '$loading'), 'unloading': ('not loading', '!$loading'),
    'exists': ('lfs.attributes(%(path)s, "mode")', '[file exists %(path)s]'),
    'readable': ('isFile(%(path)s) and io.open(%(path)s)', '[file isfile %(path)s] && [file readable %(path)s]'),
    'empty': ('isFile(%(path)s) and lfs.attributes(%(path)s, "size") == 0',
              '[file isfile %(path)s] && [file size %(path)s] == 0'),
    'is_set': ('os.getenv("SINGULARITYENV_%(name)s") or os.getenv("APPTAINERENV_%(name)s")',
               '[info exists ::env(SINGULARITYENV_%(name)s)] || [info exists ::env(APPTAINERENV_%(name)s)]'),
    'is_ours': (
        '(" " .. (os.getenv("SLINGTORCH_CONTAINER_ENVIRONMENT") or "") .. " "):find(" %(name)s ", 1, true)',
        '[info exists ::env(SLINGTORCH_CONTAINER_ENVIRONMENT)]'
        ' && "%(name)s" in $::env(SLINGTORCH_CONTAINER_ENVIRONMENT)'),
    'setenv': ('setenv("%(name)s", %(value)s)\n', 'setenv %(name)s %(value)s\n'),
    'prepend': ('prepend_path("%(name)s", %(value)s, "%(separator)s")\n',
                'prepend-path -d "%(separator)s" %(name)s %(value)s\n'),
    'message': ('LmodMessage(myModuleFullName() .. ": " .. %(value)s)\n',
                'puts stderr [join [list [module-info name] %(value)s] ": "]\n'),
    'error': ('LmodError(%(value)s)\n', 'if {[llength [info commands reportError]]} { reportError %(value)s; break }\n'
              'error %(value)s\n'),
}


def module_text(container, root, sif_variable, lua):
    """What a module file says of what Singularity.container() returned, in Lua or Tcl; sif_variable: besides SIF."""
    words = {word: forms[not lua] for word, forms in WORDS.items()}
    image, dirs = container['image'][0], [root] + container['central']
    packages, squashfs = os.path.join(root, 'user-software'), os.path.join(root, 'user-software.squashfs')

    def say(word, **values):
        """A statement or condition; values and paths are quoted."""
        quoted = {key: quote(text, lua) if key in ('path', 'value') else text for key, text in values.items()}
        return words[word] % quoted

    def join(word, *conditions):
        return words[word].join(conditions)  # in both languages 'and' comes before 'or'

    def when(*branches):
        """Branches of if, elseif and, where the condition is None, else: condition and statements each."""
        text = ''
        for number, (condition, *statements) in enumerate(branches):
            text += say('else' if condition is None else 'elseif' if number else 'if', condition=condition)
            text += ''.join('    %s\n' % line for line in ''.join(statements).splitlines())
        return text + words['end']

    def both(kind, suffix, **values):
        """The same statement for the variables of both runtimes."""
        return say(kind, name='SINGULARITY' + suffix, **values) + say(kind, name='APPTAINER' + suffix, **values)

    def use(path):
        return say('setenv', name='SIF', value=path) + say('setenv', name=sif_variable, value=path)

    loading, unloading = words['loading'], words['unloading']
    own, *central = [os.path.join(path, image) for path in dirs]
    missing = ("The container image %s is missing or cannot be read. Looked in: %s\nRemedy: 'eb --rebuild %s' installs "
               "it again" % (image, ', '.join(dirs), container['easyconfig'][0]))
    text = words['start'] + say('comment', text='the image: the own copy, else the first central one that can be read')
    text += when(
        (join('or', unloading, say('readable', path=own)), use(own)),
        *[(say('readable', path=path), use(path),
           say('message', value="its own copy of the container image is not there; using " + path))
          for path in central],
        (None, say('error', value=missing)))
    text += when((join('and', loading, say('empty', path=squashfs)), say('error', value=(
        "%s is empty: left behind by something that was interrupted.\nRemedy: remove it; the packages are then those "
        "of the directory %s" % (squashfs, packages)))))
    text += say('setenv', name='CONTAINERROOT', value=root)

    text += say('comment', text='what is mounted: host paths that exist now; packages from one file or a directory')
    binds = ([os.path.join(root, 'runscripts') + ':/runscripts:ro'] + container['bind']
             + [squashfs + ':/user-software:image-src=/user-software', packages + ':/user-software'])
    for bind in reversed(binds):
        exists = say('exists', path=bind.split(':')[0])
        if bind == binds[-1]:
            exists = join('and', exists, words['not'] % say('exists', path=squashfs))
        text += when((join('or', unloading, exists), both('prepend', '_BINDPATH', value=bind, separator=',')))
    for path in reversed(container['path']):
        text += both('prepend', 'ENV_PREPEND_PATH', value=path, separator=':')

    for driver in container['gpu']:
        text += say('comment', text='GPUs: the libraries of the driver, as with the option --%s' % driver.lower())
        text += both('setenv', '_' + driver, value='1')

    # not with pushenv, which would win over the user, and which Lmod 8.6 forgets in Tcl
    text += say('comment', text='variables inside, unless the user has set them')
    for variable in container['env']:
        name, value = variable.split('=', 1)
        free = join('and', loading, words['not'] % say('is_set', name=name))
        text += when((join('or', free, join('and', unloading, say('is_ours', name=name))),
                      both('setenv', 'ENV_' + name, value=value),
                      say('prepend', name='SLINGTORCH_CONTAINER_ENVIRONMENT', value=name, separator=' ')))
    return text + '\n'


def quote(text, lua):
    """Text as a string of Lua or as a word of Tcl."""
    if lua:
        return json.dumps(text, ensure_ascii=False)
    return '"%s"' % re.sub(r'([\\$\[\]"{}])', r'\\\1', text).replace('\n', '\\n')
