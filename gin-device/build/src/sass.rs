// SPDX-License-Identifier: MIT OR Apache-2.0

//! The machine code of an assembled kernel, as text.

use std::process::Command;

use crate::error::BuildError;
use crate::ptxas::Report;

/// The machine code of a kernel: instructions as text, each as `@P0 LDG.E.64.STRONG.SYS R4, desc[UR8][R2.64]`, without
/// NOPs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Code {
    /// The instructions of the kernel itself, in the order of their addresses.
    pub inlined: Vec<String>,
    /// The instructions of the functions that it calls.
    pub called: Vec<String>,
}

/// The machine code of a module, as text.
#[derive(Clone, Debug)]
pub struct Disassembly {
    listing: String,
}

impl Report {
    /// Disassembles the module. `nvdisasm`, from the assembler's folder, takes a second for a megabyte of machine code.
    ///
    /// # Errors
    /// Fails with [`BuildError::Disassemble`] if `nvdisasm` refuses the file, and with [`BuildError::Io`] if it cannot
    /// run.
    pub fn disassemble(&self) -> Result<Disassembly, BuildError> {
        let tool = self.tool.with_file_name("nvdisasm");
        let output = Command::new(&tool).arg(&self.cubin).output().map_err(BuildError::io("run", &tool))?;
        if !output.status.success() {
            let output = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(BuildError::Disassemble { cubin: self.cubin.clone(), output });
        }
        Ok(Disassembly { listing: String::from_utf8_lossy(&output.stdout).into_owned() })
    }
}

impl Disassembly {
    /// Returns the machine code of a kernel.
    ///
    /// # Errors
    /// Fails with [`BuildError::NoKernel`] if the module has no such kernel.
    pub fn code(&self, kernel: &str) -> Result<Code, BuildError> {
        let code = code(&self.listing, kernel);
        if code.inlined.is_empty() { Err(BuildError::NoKernel { kernel: kernel.to_owned() }) } else { Ok(code) }
    }
}

/// Returns the code of a kernel in a listing of a whole module.
///
/// The section of a kernel begins with the line `.text.NAME:`. Each function that it calls follows in that section,
/// behind the label `$NAME$FUNCTION:`, or `$__internal_0_$FUNCTION:` for a function of the assembler's own.
fn code(listing: &str, kernel: &str) -> Code {
    let mut code = Code::default();
    let (mut here, mut in_function) = (false, false);
    for line in listing.lines() {
        let label = line.trim_end().strip_suffix(':');
        if let Some(section) = label.and_then(|label| label.strip_prefix(".text.")) {
            (here, in_function) = (section == kernel, false);
        } else if label.is_some_and(|label| label.starts_with('$')) {
            in_function = true;
        } else if let Some(instruction) = instruction(line).filter(|_| here) {
            if in_function { code.called.push(instruction) } else { code.inlined.push(instruction) }
        }
    }
    code
}

/// Returns the instruction on a line of a listing: `/*0010*/   EXIT ;   /* encoding */`.
fn instruction(line: &str) -> Option<String> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    // The second half of an encoding is on a separate line and begins with `0x`.
    if address.len() < 4 || !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let text = rest.split_once(';').map_or(rest, |(text, _)| text).trim();
    (!text.is_empty() && text != "NOP").then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\t.section\t.text.other,\"ax\"\n.text.other:\n        /*0000*/   EXIT ;\n\
        .text.kernel:\n        /*0000*/   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */\n\
        \x20                                              /* 0x000fe20000000800 */\n        /*0010*/   EXIT ;\n\
        .L_x_0:\n        /*0020*/   NOP;\n        /*12340*/   @P0 BRA `(.L_x_0) ;\n\
        \t\t.type\t\t$kernel$slow,@function\n$kernel$slow:\n        /*0030*/   RET.REL.NODEC R2 `(kernel) ;\n\
        .text.third:\n        /*0000*/   BPT.TRAP 0x1 ;\n";

    #[test]
    fn a_listing_is_read_by_kernels_and_called_functions_without_nops() {
        let found = code(LISTING, "kernel");
        assert_eq!(found.inlined, ["LDC R1, c[0x0][0x28]", "EXIT", "@P0 BRA `(.L_x_0)"]);
        assert_eq!(found.called, ["RET.REL.NODEC R2 `(kernel)"]);
        let module = Disassembly { listing: LISTING.to_owned() };
        assert_eq!(module.code("kernel").unwrap(), found);
        assert_eq!(module.code("none").unwrap_err().to_string(), "the module has no kernel `none`");
    }
}
