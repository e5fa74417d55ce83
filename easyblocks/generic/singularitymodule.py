##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle: it subclasses EasyBuild's classes and is distributed under
# the same licence, the GNU General Public License version 2 (see the file LICENSE).
##
"""
EasyBuild support for the module file of a container image, in Lua and Tcl, self-contained,
implemented as the base of the Singularity easyblock.
"""
import json
import re

from easybuild.easyblocks.generic.singularityimage import SingularityImage
from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError, print_warning
from easybuild.tools.config import update_build_option
from easybuild.tools.filetools import convert_name
from easybuild.tools.module_generator import ModuleGeneratorLua

# One container module at a time: SIF and /user-software can mean one image only. Lmod replaces the one that is loaded,
# Environment Modules refuses.
FAMILY = 'container_image'

# Both texts do the same. While loading they decide by what is there; in all other modes (unloading above all) they name
# everything that loading can have set, so that nothing stays behind whatever has been removed meanwhile.
LUA = r'''
family("%(family)s")
local loading = mode() == "load"
local image_name = %(image)s
local image_dirs = {%(dirs)s}
local squashfs = pathJoin(root, "user-software.squashfs")

-- the image: the own copy, else the first central one that can be read
local function readable(path)
    local handle = isFile(path) and io.open(path, "r")
    if handle then handle:close() end
    return handle
end
local image = pathJoin(root, image_name)
if loading then
    local found
    for _, dir in ipairs(image_dirs) do
        if not found and readable(pathJoin(dir, image_name)) then found = pathJoin(dir, image_name) end
    end
    if not found then
        LmodError("The container image " .. image_name .. " is missing or cannot be read. Looked in: "
            .. table.concat(image_dirs, ", ") .. "\nRemedy: 'eb --rebuild %(easyconfig)s' installs it again")
    elseif found ~= image then
        LmodMessage(myModuleFullName() .. ": its own copy of the container image is not there; using " .. found)
    end
    if isFile(squashfs) and lfs.attributes(squashfs, "size") == 0 then
        LmodError(squashfs .. " is empty: left behind by something that was interrupted.\nRemedy: remove it; "
            .. "the packages are then those of the directory " .. pathJoin(root, "user-software"))
    end
    image = found
end
setenv("SIF", image)
setenv("%(sif_variable)s", image)
setenv("CONTAINERROOT", root)

-- what is mounted in the container: host paths that exist now
local binds = {}
for _, bind in ipairs({%(binds)s}) do
    if not loading or lfs.attributes(bind:match("^[^:]*"), "mode") then table.insert(binds, bind) end
end
if not loading or isFile(squashfs) then
    table.insert(binds, squashfs .. ":/user-software:image-src=/user-software")
end
if not loading or (isDir(pathJoin(root, "user-software")) and not isFile(squashfs)) then
    table.insert(binds, pathJoin(root, "user-software") .. ":/user-software")
end

-- Where both are set, Apptainer looks at its own variable alone. So both get the same, and what the user has in one of
-- them only is copied into the other one, and remembered for the way back.
local function copy_user_value(from, to)
    local remembered = "SLINGTORCH_COPIED_" .. to
    local copied = os.getenv(remembered) or ""
    if loading then copied = (os.getenv(to) or "") == "" and os.getenv(from) or "" end
    return function(separator)
        if copied ~= "" then
            prepend_path(to, copied, separator)
            setenv(remembered, copied)
        end
    end
end
local function prepend_both(variable, separator, entries)
    local singularity, apptainer = "SINGULARITY" .. variable, "APPTAINER" .. variable
    local copy_there, copy_back = copy_user_value(singularity, apptainer), copy_user_value(apptainer, singularity)
    copy_there(separator)
    copy_back(separator)
    for i = #entries, 1, -1 do
        prepend_path(singularity, entries[i], separator)
        prepend_path(apptainer, entries[i], separator)
    end
end
prepend_both("_BINDPATH", ",", binds)
prepend_both("ENV_PREPEND_PATH", ":", {%(paths)s})

-- variables inside the container, unless the user has set them; pushenv would win over the user
local names = loading and "" or os.getenv("SLINGTORCH_CONTAINER_ENVIRONMENT") or ""
for _, variable in ipairs({%(variables)s}) do
    local singularity, apptainer = "SINGULARITYENV_" .. variable[1], "APPTAINERENV_" .. variable[1]
    if loading and not os.getenv(singularity) and not os.getenv(apptainer) then
        names = names .. " " .. variable[1] .. " "
    end
    if names:find(" " .. variable[1] .. " ", 1, true) then
        setenv(singularity, variable[2])
        setenv(apptainer, variable[2])
    end
end
if names ~= "" then setenv("SLINGTORCH_CONTAINER_ENVIRONMENT", names) end
'''

TCL = r'''
if {[llength [info commands family]]} {
    family %(family)s
} elseif {[module-info mode load] && [info exists ::env(CONTAINERROOT)] && $::env(CONTAINERROOT) ne $root} {
    # Environment Modules before 5.1 has no families
    error "another container module is loaded ($::env(CONTAINERROOT)): unload it first"
}
set loading [module-info mode load]
set image_name %(image)s
set image_dirs [list %(dirs)s]
set squashfs $root/user-software.squashfs

# the image: the own copy, else the first central one that can be read
set image $root/$image_name
if {$loading} {
    set found ""
    foreach dir $image_dirs {
        if {$found eq "" && [file isfile $dir/$image_name] && [file readable $dir/$image_name]} {
            set found $dir/$image_name
        }
    }
    set failure ""
    if {$found eq ""} {
        set failure "The container image $image_name is missing or cannot be read. Looked in: [join $image_dirs {, }]\
            \nRemedy: 'eb --rebuild %(easyconfig)s' installs it again"
    } elseif {[file isfile $squashfs] && [file size $squashfs] == 0} {
        set failure "$squashfs is empty: left behind by something that was interrupted.\
            \nRemedy: remove it; the packages are then those of the directory $root/user-software"
    } elseif {$found ne $image} {
        puts stderr "[module-info name]: its own copy of the container image is not there; using $found"
    }
    if {$failure ne "" && [llength [info commands reportError]]} {
        reportError $failure
        break
    } elseif {$failure ne ""} {
        error $failure
    }
    set image $found
}
setenv SIF $image
setenv %(sif_variable)s $image
setenv CONTAINERROOT $root

# what is mounted in the container: host paths that exist now
set binds {}
foreach bind [list %(binds)s] {
    if {!$loading || [file exists [lindex [split $bind :] 0]]} { lappend binds $bind }
}
if {!$loading || [file isfile $squashfs]} {
    lappend binds $squashfs:/user-software:image-src=/user-software
}
if {!$loading || ([file isdirectory $root/user-software] && ![file isfile $squashfs])} {
    lappend binds $root/user-software:/user-software
}

# Where both are set, Apptainer looks at its own variable alone. So both get the same, and what the user has in one of
# them only is copied into the other one, and remembered for the way back.
foreach {variable separator entries} [list _BINDPATH , $binds ENV_PREPEND_PATH : [list %(paths)s]] {
    set copies {}
    foreach {from to} {SINGULARITY APPTAINER APPTAINER SINGULARITY} {
        set from $from$variable
        set to $to$variable
        set remembered SLINGTORCH_COPIED_$to
        set copied ""
        if {$loading} {
            if {(![info exists ::env($to)] || $::env($to) eq "") && [info exists ::env($from)]} {
                set copied $::env($from)
            }
        } elseif {[info exists ::env($remembered)]} {
            set copied $::env($remembered)
        }
        if {$copied ne ""} { lappend copies $to $remembered $copied }
    }
    foreach {to remembered copied} $copies {
        foreach entry [lreverse [split $copied $separator]] {
            if {$entry ne ""} { prepend-path -d $separator $to $entry }
        }
        setenv $remembered $copied
    }
    foreach entry [lreverse $entries] {
        prepend-path -d $separator SINGULARITY$variable $entry
        prepend-path -d $separator APPTAINER$variable $entry
    }
}

# variables inside the container, unless the user has set them; pushenv would win over the user, and Lmod 8.6 does not
# undo it in Tcl files
set names {}
if {!$loading && [info exists ::env(SLINGTORCH_CONTAINER_ENVIRONMENT)]} {
    set names $::env(SLINGTORCH_CONTAINER_ENVIRONMENT)
}
foreach {name value} [list %(variables)s] {
    if {$loading && ![info exists ::env(SINGULARITYENV_$name)] && ![info exists ::env(APPTAINERENV_$name)]} {
        lappend names $name
    }
    if {$name in $names} {
        setenv SINGULARITYENV_$name $value
        setenv APPTAINERENV_$name $value
    }
}
if {[llength $names]} { setenv SLINGTORCH_CONTAINER_ENVIRONMENT $names }
'''


class SingularityModule(SingularityImage):
    """Makes the module file of a container image; no site-wide code for Lmod or Environment Modules is needed."""

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters for what a container sees of its host."""
        extra_vars = SingularityImage.extra_options(extra_vars)
        extra_vars.update({
            'bind_paths': [[], "Paths of the host to mount in the container, where they exist: 'PATH' or "
                               "'PATH:PATH_INSIDE[:ro]'", CUSTOM],
            'container_environment': [{}, "Environment variables inside the container: {name: value}", CUSTOM],
            'container_path': [[], "Directories inside the container to put first in $PATH there, after /runscripts",
                               CUSTOM],
            'preset_venv': [None, "Name of a virtual environment for the user's own packages: made at installation as "
                                  "/user-software/venv/<name>, on top of the packages of the image", CUSTOM],
            'preset_venv_packages': [[], "Packages to install into preset_venv when it is made, as pip takes them",
                                     CUSTOM],
            'preset_venv_squashfs': [False, "Pack preset_venv into one file when it is made; unmake-squashfs is the "
                                            "way back", CUSTOM],
        })
        return extra_vars

    def bind_mounts(self):
        """The bind_paths of the easyconfig, checked: the runtime takes a comma or a colon for a separator."""
        for bind in self.cfg['bind_paths']:
            if not re.match(r'^/[^,:\n"]*(:/[^,:\n"]*(:[a-z]+)?)?$', bind):
                raise EasyBuildError("Easyconfig parameter bind_paths has '%s': it must be an absolute path, or two "
                                     "with a colon between, without comma or further colon in them. A path with such a "
                                     "name can be mounted through a symbolic link with another name", bind)
        return self.cfg['bind_paths']

    def path_inside(self):
        """Directories that come first in $PATH inside the container."""
        venv = self.cfg['preset_venv']
        return (['/runscripts'] + (['/user-software/venv/%s/bin' % venv] if venv else [])
                + list(self.cfg['container_path']))

    def environment_inside(self):
        """Environment variables inside the container."""
        # packages in ~/.local would hide those of the image
        variables = dict({'PYTHONNOUSERSITE': '1'}, **self.cfg['container_environment'])
        if self.cfg['preset_venv']:
            variables.setdefault('VIRTUAL_ENV', '/user-software/venv/%s' % self.cfg['preset_venv'])
        return variables

    def make_module_extra(self, *args, **kwargs):
        """Set the variables of the container (docs/containers.md has the list)."""
        txt = super().make_module_extra(*args, **kwargs)
        facts = self.recorded_facts()
        if facts:
            txt += self.module_generator.comment('%(file)s: %(size)d bytes, sha256 %(sha256)s' % facts)

        lua = isinstance(self.module_generator, ModuleGeneratorLua)
        quote, root, separator = (quote_lua, 'root', ', ') if lua else (quote_tcl, '$root', ' ')
        runscripts = 'pathJoin(root, "runscripts") .. ":/runscripts"' if lua else '$root/runscripts:/runscripts'
        return txt + (LUA if lua else TCL) % {
            'binds': separator.join([runscripts] + [quote(bind) for bind in self.bind_mounts()]),
            'dirs': separator.join([root] + [quote(path) for path in self.cfg['central_image_dirs']]),
            'easyconfig': self.easyconfig_name(),
            'family': FAMILY,
            'image': quote(self.image_name),
            'paths': separator.join(quote(path) for path in self.path_inside()),
            'variables': separator.join(('{%s, %s}' if lua else '%s %s') % (quote(name), quote(str(value)))
                                        for name, value in sorted(self.environment_inside().items())),
            'sif_variable': 'SIF' + convert_name(self.name, upper=True),
        } + '\n'

    def make_module_step(self, fake=False):
        """Make the module file also when there is no image yet."""
        if fake or self.dry_run or self.find_image():
            return super().make_module_step(fake=fake)
        # 'eb --module-only --force': the devel module would need a module that can be loaded
        print_warning("The module can be loaded once the image %s is there (eb --rebuild %s)"
                      % (self.image_name, self.easyconfig_name()), log=self.log)
        wanted = update_build_option('generate_devel_module', False)
        try:
            return super().make_module_step(fake=fake)
        finally:
            update_build_option('generate_devel_module', wanted)

    def easyconfig_name(self):
        """File name of the easyconfig, for messages."""
        return '%s-%s%s.eb' % (self.name, self.version, self.cfg['versionsuffix'])


def quote_lua(text):
    """Text as a string of Lua."""
    return json.dumps(text, ensure_ascii=False)


def quote_tcl(text):
    """Text as a word of Tcl."""
    return '"%s"' % re.sub(r'([\\$\[\]"{}])', r'\\\1', text)
