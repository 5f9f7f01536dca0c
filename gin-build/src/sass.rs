// SPDX-License-Identifier: MIT OR Apache-2.0

//! The machine code of an assembled kernel, as text.

use std::env;
use std::process::Command;

use crate::error::BuildError;
use crate::ptxas::Report;

impl Report {
    /// Returns the instructions of a kernel in the order of their addresses, without NOPs, each as `@P0
    /// LDG.E.64.STRONG.SYS R4, desc[UR8][R2.64]`. `cuobjdump`, from the assembler's folder, disassembles them.
    ///
    /// # Errors
    /// Fails with [`BuildError::Disassemble`] if there is no such kernel, and with [`BuildError::Io`] if `cuobjdump`
    /// cannot run.
    pub fn instructions(&self, kernel: &str) -> Result<Vec<String>, BuildError> {
        let tool = self.tool.with_file_name("cuobjdump");
        // It runs `nvdisasm` from `PATH`.
        let folders = tool.parent().map(|folder| folder.to_path_buf()).into_iter();
        let known = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths(folders.chain(env::split_paths(&known))).unwrap_or(known);
        let mut command = Command::new(&tool);
        command.args(["-sass", "-fun", kernel]).arg(&self.cubin).env("PATH", path);
        let output = command.output().map_err(BuildError::io("run", &tool))?;
        let listing = String::from_utf8_lossy(&output.stdout);
        let found: Vec<String> = listing.lines().filter_map(instruction).collect();
        if !output.status.success() || found.is_empty() {
            let said = format!("{listing}{}", String::from_utf8_lossy(&output.stderr));
            return Err(BuildError::Disassemble { kernel: kernel.to_owned(), output: said });
        }
        Ok(found)
    }
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

    #[test]
    fn a_listing_is_read_by_instructions_without_nops() {
        let listing = "\n\tcode for sm_90\n        /*0000*/   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */\n\
                       \x20                                              /* 0x000fe20000000800 */\n        /*0010*/   EXIT ;\n\
                       \x20       /*0020*/   NOP;\n        /*12340*/   @P0 BRA 0x12340;\n";
        let found: Vec<String> = listing.lines().filter_map(instruction).collect();
        assert_eq!(found, ["LDC R1, c[0x0][0x28]", "EXIT", "@P0 BRA 0x12340"]);
    }
}
